"""pack_lora_act: the fragment order by its definition, through a simulated MMA, and back."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same

SIZES = [(1, 1), (5, 16), (16, 16), (17, 24), (33, 96), (64, 256), (0, 16), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "r"), SIZES)
def test_every_element_lies_where_the_manual_says(m: int, r: int, dtype: torch.dtype) -> None:
    lora_act = torch.randn(m, r)
    packed = ops.pack_lora_act(lora_act, dtype)
    assert packed.shape == (-(-m // 16), -(-r // 16), 32, 8)
    assert packed.is_contiguous()
    for row in range(packed.shape[0]):
        for step in range(packed.shape[1]):
            for lane in range(32):
                for i in range(8):
                    y = 16 * row + lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
                    x = 16 * step + lane % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
                    wanted = lora_act[y, x].to(dtype).item() if y < m and x < r else 0.0
                    assert packed[row, step, lane, i].item() == wanted, (row, step, lane, i)


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_unpack_is_the_inverse(m: int, r: int) -> None:
    lora_act = torch.randn(m, r)
    unpacked = ops.unpack_lora_act(ops.pack_lora_act(lora_act, torch.float16), m, r)
    assert_same(unpacked, lora_act.half().float(), "round trip")


def test_rounding_is_a_cast() -> None:
    values = torch.tensor([[1e5, -1e5, float("nan"), float("inf"), 1 + 2**-11, 1 + 3 * 2**-11]])
    unpacked = ops.unpack_lora_act(ops.pack_lora_act(values, torch.float16), 1, 6)
    assert_same(unpacked, values.half().float(), "cast")


@pytest.mark.parametrize(
    ("lora_act", "dtype", "message"),
    [
        (torch.zeros(4), torch.float16, r"shape \[4\]"),
        (torch.zeros(4, 4).half(), torch.float16, "dtype float16, wanted float32"),
        (torch.zeros(4, 4), torch.float32, "dtype is torch.float32"),
    ],
)
def test_refused_by_name(lora_act: torch.Tensor, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(OpError, match=f"pack_lora_act: .*{message}"):
        ops.pack_lora_act(lora_act, dtype)


def test_registration() -> None:
    torch.library.opcheck(ops.pack_lora_act, (torch.randn(17, 24), torch.bfloat16))
