"""inv_rms against FP64, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, make_input


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 7), (17, 576), (5, 1021), (1, 65537), (2, 40000), (130, 64)])
def test_against_fp64(m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k).to(dtype)
    wanted = 1 / (x.double().square().mean(-1) + 1e-6).sqrt()
    assert ((ops.inv_rms(x, 1e-6).double() - wanted) / wanted).abs().max() < 1e-6


@pytest.mark.parametrize("k", [64, 1000, 40000, 100001])
def test_a_row_is_the_same_alone(k: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = make_input(67, k, torch.bfloat16)
        batched = ops.inv_rms(x, 1e-5)
        for m in (0, 1, 33, 66):
            assert_same(ops.inv_rms(x[m : m + 1], 1e-5)[0], batched[m], f"row {m}")
    finally:
        torch.set_num_threads(before)


def test_edges() -> None:
    assert ops.inv_rms(torch.zeros(2, 64), 0.25).tolist() == [2.0, 2.0]
    assert ops.inv_rms(torch.zeros(0, 64), 1e-6).shape == (0,)
    assert ops.inv_rms(torch.full((1, 64), 300.0).half(), 0.0).item() == pytest.approx(1 / 300)  # 300² is not FP16
    x = torch.ones(3, 64)
    x[1, 5] = float("nan")
    out = ops.inv_rms(x, 1e-6)
    assert out.isnan().tolist() == [False, True, False]
    strided = torch.randn(6, 128)[::2, ::2]
    assert_same(ops.inv_rms(strided, 1e-6), ops.inv_rms(strided.contiguous(), 1e-6), "strided")


@pytest.mark.parametrize(
    ("x", "eps", "message"),
    [
        (torch.zeros(64), 1e-6, "1 dimensions"),
        (torch.zeros(2, 0), 1e-6, "no columns"),
        (torch.zeros(2, 4, dtype=torch.float64), 1e-6, "dtype float64"),
        (torch.zeros(2, 4), -1.0, "eps is -1"),
        (torch.zeros(2, 4), float("nan"), "eps is nan"),
    ],
)
def test_refused_by_name(x: torch.Tensor, eps: float, message: str) -> None:
    with pytest.raises(OpError, match=f"inv_rms: .*{message}"):
        ops.inv_rms(x, eps)


def test_registration() -> None:
    torch.library.opcheck(ops.inv_rms, (torch.randn(3, 64), 1e-6))
