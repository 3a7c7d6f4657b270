"""What the layouts do to tokens: values written out by loops, and each refusal with the sizes that it is about."""

from __future__ import annotations

import naive_layouts as naive
import pytest
import torch
from linear_samples import assert_same

from omniw4.errors import LayoutError
from omniw4.repack import mma_s8, wgmma_s8


def codes_of(m: int, k: int) -> torch.Tensor:
    return torch.randint(-128, 128, (m, k), generator=torch.Generator().manual_seed(m + k), dtype=torch.int8)


def padded(a_scales: torch.Tensor) -> torch.Tensor:
    """``[M, G]`` to ``[G, M']`` float32, a number at a time."""
    m, groups = a_scales.shape
    out = torch.zeros(groups, -(-m // 16) * 16)
    for token in range(m):
        for group in range(groups):
            out[group, token] = a_scales[token, group]
    return out


@pytest.mark.parametrize(("m", "k"), [(1, 64), (16, 64), (17, 192)])
def test_mma_s8_keeps_codes_and_pads_scales(m: int, k: int) -> None:
    codes = codes_of(m, k)
    a_scales = torch.rand(m, k // 64, generator=torch.Generator().manual_seed(1)).half()
    found, scales = mma_s8.pack_activations(codes, a_scales, 4)
    assert_same(found, codes, "codes")
    assert_same(scales, padded(a_scales), "a_scales")
    assert scales.is_contiguous()
    for one in (a_scales[:, :1], a_scales[:, :1].float() / 3):  # INT8's, and those beside integer group scales
        found, scales = mma_s8.pack_activations(codes, one, 8)
        assert_same(found, codes, "codes")
        assert_same(scales, padded(one)[0], "a_scales")


@pytest.mark.parametrize(
    ("codes", "a_scales", "act_bits", "message"),
    [
        (torch.zeros(4, 32).char(), torch.zeros(4, 1).half(), 4, r"codes have shape \[4, 32\], wanted \[M, K\] with K"),
        (torch.zeros(64).char(), torch.zeros(4, 1).half(), 4, r"codes have shape \[64\], wanted"),
        (torch.zeros(4, 64, 2).char(), torch.zeros(4, 1).half(), 4, r"codes have shape \[4, 64, 2\], wanted"),
        (torch.zeros(4, 64).byte(), torch.zeros(4, 1).half(), 4, "codes has dtype torch.uint8, wanted torch.int8"),
        (torch.zeros(4, 64).char(), torch.zeros(4, 1), 4, "a_scales has dtype torch.float32, wanted torch.float16"),
        (torch.zeros(4, 64).char(), torch.zeros(4, 1).double(), 8, "a_scales has dtype torch.float64"),
        (torch.zeros(4, 192).char(), torch.zeros(4, 1).half(), 4, r"a_scales has shape \[4, 1\], wanted \[4, 3\]"),
        (torch.zeros(4, 192).char(), torch.zeros(4, 3).half(), 8, r"a_scales has shape \[4, 3\], wanted \[4, 1\]"),
        (torch.zeros(4, 64).char(), torch.zeros(3, 1).half(), 4, r"a_scales has shape \[3, 1\], wanted \[4, 1\]"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    codes: torch.Tensor, a_scales: torch.Tensor, act_bits: int, message: str
) -> None:
    for layout in (mma_s8, wgmma_s8):
        with pytest.raises(LayoutError, match=message):
            layout.pack_activations(codes, a_scales, act_bits)


def test_wgmma_s8_takes_the_scales_beside_integer_ones() -> None:
    codes, a_scales = codes_of(17, 64), torch.rand(17, 1, generator=torch.Generator().manual_seed(2)) / 3
    found = wgmma_s8.pack_activations(codes, a_scales, 8)
    wanted = naive.wgmma_activations(codes, a_scales, 8)
    assert_same(found[0], wanted[0], "codes")
    assert_same(found[1], wanted[1], "a_scales")
