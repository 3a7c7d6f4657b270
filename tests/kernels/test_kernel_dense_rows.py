"""rms_norm, swiglu and quantize_fp8 on a GPU against their references."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, input_on_gpu

from omniw4 import ops
from problems import assert_same, relative_error

pytestmark = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16)
# the last three run through the references: not a multiple of eight, too wide
WIDTHS = (8, 64, 576, 1024, 1032, 2048, 3072, 4096, 12288, 16384, 7, 1021, 16392)
ULP = {torch.float16: 2e-4, torch.bfloat16: 1.5e-3}  # a unit in the last place, where the order of a sum decides it


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = torch.linspace(0.5, 1.5, width, device=DEVICE).to(dtype)
    for m in (1, 3, 257):
        x, delta = input_on_gpu(m, width + 8, dtype)[:, :width], input_on_gpu(m, width, dtype).flip(0)
        for added in (None, delta):
            y, scales, total = ops.rms_norm(x, added, weight, 1e-6, False)
            plain, _, wanted = ops.rms_norm_ref(x, added, weight, 1e-6, False)
            assert relative_error(y, plain) < ULP[dtype]
            assert_same(total, wanted, "sum")
            assert scales.shape == (m, 0)
            codes, scales, total = ops.rms_norm(x, added, weight, 1e-6, True)
            assert_same(total, wanted, "sum beside codes")
            again, same = ops.quantize_fp8(y)
            assert_same(bytes_of(codes), bytes_of(again), "codes")
            assert_same(scales, same, "scales")
        alone = ops.rms_norm(x[m // 2 : m // 2 + 1], None, weight, 1e-6, False)[0]
        assert_same(alone[0], ops.rms_norm(x, None, weight, 1e-6, False)[0][m // 2], "a row alone")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    for m in (1, 257):
        gate_up = input_on_gpu(m, 2 * width + 8, dtype)[:, : 2 * width]
        y = ops.swiglu(gate_up, False)[0]
        assert relative_error(y, ops.swiglu_ref(gate_up, False)[0]) < ULP[dtype]
        codes, scales = ops.swiglu(gate_up, True)
        again, same = ops.quantize_fp8(y)
        assert_same(bytes_of(codes), bytes_of(again), "codes")
        assert_same(scales, same, "scales")
    large = torch.full((2, 16), -30000.0, device=DEVICE, dtype=dtype)
    assert not ops.swiglu(large, False)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_fp8(width: int, dtype: torch.dtype) -> None:
    for m in (1, 257):
        x = input_on_gpu(m, width + 8, dtype)[:, :width].clone()
        if m > 4:
            x[3, 0], x[4, 0] = float("nan"), float("inf")
        codes, scales = ops.quantize_fp8(x)
        wanted, same = ops.quantize_fp8_ref(x)
        assert_same(scales, same, "scales")
        assert_same(bytes_of(codes), bytes_of(wanted), "codes")


def test_early_starts_in_a_chain() -> None:
    """Each kernel starts while the one before finishes; what it reads must be what that one wrote."""
    x, weight = input_on_gpu(704, 1024, torch.float16), torch.ones(1024, device=DEVICE, dtype=torch.float16)

    def chain() -> torch.Tensor:
        hidden = x
        for _ in range(30):
            y, _, total = ops.rms_norm(hidden, x, weight, 1e-6, False)
            hidden = ops.swiglu(torch.cat((y, total), 1), False)[0]
        return hidden

    wanted = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        graph.replay()
        assert_same(found, wanted, "replayed")
