"""quantize_fp8: the grid, its edges, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, make_input


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_the_nearest_of_the_grid(dtype: torch.dtype) -> None:
    x = make_input(9, 320, dtype)
    codes, scales = ops.quantize_fp8(x)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, (9, 320), (9, 1))
    assert torch.allclose(scales * 448, x.float().abs().amax(1, keepdim=True), rtol=1e-6, atol=0)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()]
    assert (scales == 0).flatten().tolist() == (x == 0).all(1).tolist()
    scaled = x.double() / scales.double().where(scales > 0, 1)
    nearest = (scaled[..., None] - grid).abs().amin(-1)
    assert ((codes.double() - scaled).abs() <= nearest + 448 * 2.0**-20).all()


def test_edges() -> None:
    x = torch.zeros(4, 64)
    x[1, 3] = 1e-30  # its reciprocal would not be finite without a smallest scale
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    codes, scales = ops.quantize_fp8(x)
    assert scales[0].item() == 0
    assert not codes[0].float().any()
    assert scales[1].item() == pytest.approx(2.0**-100)
    assert codes[1].float().isfinite().all()
    assert scales[2].isnan().all()
    assert (codes[3].float() * scales[3])[3].isnan()
    assert ops.quantize_fp8(x[:0])[1].shape == (0, 1)


def test_a_row_is_the_same_alone_and_strided() -> None:
    x = make_input(21, 256, torch.bfloat16)
    codes, scales = ops.quantize_fp8(x)
    alone_codes, alone_scales = ops.quantize_fp8(x[7:8])
    assert_same(alone_codes.view(torch.uint8)[0], codes.view(torch.uint8)[7], "codes")
    assert_same(alone_scales[0], scales[7], "scale")
    strided = ops.quantize_fp8(x[::2, ::2])[0]
    wanted = ops.quantize_fp8(x[::2, ::2].contiguous())[0]
    assert_same(strided.view(torch.uint8), wanted.view(torch.uint8), "strided")


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(2, 4, dtype=torch.float64)])
def test_refused_by_name(x: torch.Tensor) -> None:
    with pytest.raises(OpError, match="quantize_fp8: x"):
        ops.quantize_fp8(x)


def test_registration() -> None:
    torch.library.opcheck(ops.quantize_fp8, (torch.randn(3, 64),))
