"""rms_norm against FP64 and transformers' own, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, make_input, relative_error

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def exact(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = (x if delta is None else x + delta).double()
    return total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 8), (17, 576), (5, 1021), (3, 4096)])
def test_against_fp64(m: int, k: int, dtype: torch.dtype, with_delta: bool) -> None:
    x, weight = make_input(m, k, dtype), torch.linspace(0.5, 1.5, k).to(dtype)
    delta = make_input(m, k, dtype).flip(0) if with_delta else None
    y, scales, total = ops.rms_norm(x, delta, weight, 1e-6, False)
    assert relative_error(y, exact(x, delta, weight, 1e-6)) < 2 * torch.finfo(dtype).eps
    assert scales.shape == (m, 0)
    if delta is None:
        assert total.shape == (0, k)
    else:
        assert_same(total, x + delta, "sum")


def test_is_transformers_norm() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(192, eps=1e-5).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        x = make_input(9, 192, torch.bfloat16)
        found = ops.rms_norm(x, None, norm.weight.detach(), 1e-5, False)[0]
        assert relative_error(found, norm(x)) < 1e-3  # a unit in the last place, where the order of a sum decides it


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_the_norm_followed_by_quantize_fp8(dtype: torch.dtype) -> None:
    x, weight = make_input(11, 256, dtype), torch.linspace(0.5, 1.5, 256).to(dtype)
    y = ops.rms_norm(x, x, weight, 1e-6, False)[0]
    codes, scales, total = ops.rms_norm(x, x, weight, 1e-6, True)
    wanted_codes, wanted_scales = ops.quantize_fp8(y)
    assert_same(codes.view(torch.uint8), wanted_codes.view(torch.uint8), "codes")
    assert_same(scales, wanted_scales, "scales")
    assert_same(total, x + x, "sum")


def test_a_row_is_the_same_alone() -> None:
    x, weight = make_input(67, 1000, torch.float16), torch.ones(1000).half()
    batched = ops.rms_norm(x, None, weight, 1e-6, False)[0]
    for m in (0, 33, 66):
        assert_same(ops.rms_norm(x[m : m + 1], None, weight, 1e-6, False)[0][0], batched[m], f"row {m}")
    assert ops.rms_norm(x[:0], x[:0], weight, 1e-6, True)[0].shape == (0, 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(64)}, "1 dimensions"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "dtype float64"),
        ({"delta": torch.zeros(3, 64)}, r"delta has shape \[3, 64\], wanted \[2, 64\]"),
        ({"delta": torch.zeros(2, 64).half()}, "delta has dtype float16, wanted float32"),
        ({"weight": torch.zeros(65)}, r"weight has shape \[65\], wanted \[64\]"),
        ({"weight": torch.zeros(64).half()}, "weight has dtype float16"),
        ({"eps": -1.0}, "eps is -1"),
    ],
)
def test_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments = {"x": torch.zeros(2, 64), "delta": None, "weight": torch.ones(64), "eps": 1e-6, "fp8": False} | change
    with pytest.raises(OpError, match=f"rms_norm: .*{message}"):
        ops.rms_norm(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("fp8", [False, True])
def test_registration(fp8: bool) -> None:
    x = torch.randn(3, 64)
    for delta in (None, x + 1):
        torch.library.opcheck(ops.rms_norm, (x, delta, torch.ones(64), 1e-6, fp8))
