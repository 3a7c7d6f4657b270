"""swiglu against FP64, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, make_input, relative_error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "width"), [(1, 1), (3, 7), (17, 192), (4, 3072)])
def test_against_fp64(m: int, width: int, dtype: torch.dtype) -> None:
    gate_up = make_input(m, 2 * width, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    y, scales = ops.swiglu(gate_up, False)
    assert relative_error(y, gate * gate.sigmoid() * up) < torch.finfo(dtype).eps
    assert scales.shape == (m, 0)


def test_fp8_is_swiglu_followed_by_quantize_fp8() -> None:
    gate_up = make_input(11, 512, torch.bfloat16)
    codes, scales = ops.swiglu(gate_up, True)
    wanted_codes, wanted_scales = ops.quantize_fp8(ops.swiglu(gate_up, False)[0])
    assert_same(codes.view(torch.uint8), wanted_codes.view(torch.uint8), "codes")
    assert_same(scales, wanted_scales, "scales")


def test_a_row_is_the_same_alone() -> None:
    gate_up = make_input(67, 1000, torch.float16)
    batched = ops.swiglu(gate_up, False)[0]
    for m in (0, 33, 66):
        assert_same(ops.swiglu(gate_up[m : m + 1], False)[0][0], batched[m], f"row {m}")
    assert ops.swiglu(gate_up[:0], True)[0].shape == (0, 500)


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-60000.0, 60000.0, 2.0, 0.5]]).half()
    assert ops.swiglu(gate_up, False)[0].tolist() == [[0.0, 30000.0]]


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(4), "1 dimensions"),
        (torch.zeros(2, 5), "5 columns"),
        (torch.zeros(2, 0), "0 columns"),
        (torch.zeros(2, 4, dtype=torch.float64), "dtype float64"),
    ],
)
def test_refused_by_name(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(OpError, match=f"swiglu: .*{message}"):
        ops.swiglu(gate_up, False)


@pytest.mark.parametrize("fp8", [False, True])
def test_registration(fp8: bool) -> None:
    torch.library.opcheck(ops.swiglu, (torch.randn(3, 64), fp8))
