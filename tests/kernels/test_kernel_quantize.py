"""quantize_lora_down on a GPU: codes, scales and packing bit for bit, the low-rank product within its bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import DEVICE, LAYOUT, input_on_gpu, linear_on_gpu

from omniw4 import ops, repack
from problems import assert_same, relative_error
from shapes import Shape, full, ids

pytestmark = pytest.mark.gpu
Record = Callable[[str, object], None]
DTYPES = (torch.float16, torch.bfloat16)
SHAPES = list(dict.fromkeys(Shape(s.m, 8, s.k, s.r) for s in full()))  # N plays no part


def both(x: torch.Tensor, *arguments: object) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(kernel, reference) in the canonical layout."""
    found = ops.quantize_lora_down(x, *arguments, "canonical")  # type: ignore[arg-type]
    return found[:3], ops.quantize_lora_down_ref(x, *arguments)[:3]  # type: ignore[arg-type]


def assert_low_rank(record: Record, found: torch.Tensor, x: torch.Tensor, down: torch.Tensor) -> None:
    """At most twice the error of the same product in the dtype of x, against FP64; both go into the test report."""
    rotated = ops.transform(x, None, None, None, "hadamard64")
    exact = rotated.double() @ down.double()
    plain = rotated.to(x.dtype) @ down.to(x.dtype)
    ours, theirs = relative_error(found, exact), relative_error(plain, exact)
    record("lora_act error", ours)
    record("lora_act error of plain torch", theirs)
    assert ours <= 2 * theirs + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_every_shape(shape: Shape, dtype: torch.dtype, record_property: Record) -> None:
    x = input_on_gpu(shape.m, shape.k, dtype)
    down = linear_on_gpu(8, shape.k, shape.r, dtype).proj_down
    (qact, a_scales, lora_act), (want_qact, want_scales, _) = both(x, down, None, None, None, "hadamard64", 4, 0.95)
    assert_same(qact, want_qact, "codes")
    assert_same(a_scales, want_scales, "scales")
    assert lora_act.shape == (shape.m, shape.r)
    if down is not None:
        assert_low_rank(record_property, lora_act, x, down)
    fragments, scales, again, _ = ops.quantize_lora_down(x, down, None, None, None, "hadamard64", 4, 0.95, LAYOUT)
    want_fragments, want_packed = repack.get(LAYOUT).pack_activations(want_qact, want_scales)  # type: ignore[attr-defined]
    assert_same(fragments, want_fragments, "codes in fragment order")
    assert_same(scales, want_packed, "scales in fragment order")
    assert_same(again, lora_act, "lora_act beside fragment order")


@pytest.mark.parametrize("act_bits", [4, 8, 16])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(dtype: torch.dtype, rotation: str, norm: bool, smooth: bool, act_bits: int) -> None:
    for m, k, rank in ((1, 64, 16), (37, 704, 24), (130, 1024, 0), (19, 576, 256)):
        x = input_on_gpu(m, k, dtype, seed=m)
        g = torch.Generator(DEVICE).manual_seed(k)
        inv_smooth = (torch.rand(k, generator=g, device=DEVICE) + 0.5).reciprocal() if smooth else None
        weight = (torch.rand(k, generator=g, device=DEVICE) + 0.5).to(dtype) if norm else None
        rms = ops.inv_rms_ref(x, 1e-6) if norm else None
        down = linear_on_gpu(8, k, rank, dtype).proj_down
        found, wanted = both(x, down, inv_smooth, rms, weight, rotation, act_bits, 1.0)
        assert_same(found[0], wanted[0], f"codes at m {m}, k {k}")
        assert_same(found[1], wanted[1], f"scales at m {m}, k {k}")
        if down is not None:
            assert relative_error(found[2], wanted[2]) < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_edges(dtype: torch.dtype, act_bits: int, rotation: str) -> None:
    """Zeros, ties, the smallest and the largest numbers, NaN and inf: as the reference has it."""
    x = input_on_gpu(16, 192, dtype)
    x[0] = 0
    x[1, 0], x[2, 70], x[3, 191] = float("nan"), float("inf"), float("-inf")
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).smallest_normal
    x[6] = torch.finfo(dtype).smallest_normal / 8
    x[7, :64] = torch.arange(64, device=DEVICE) / 2 - 16  # half codes when the scale is a power of two
    x[8] = 1e-6
    x[9, ::2], x[9, 1::2] = 3.5, -3.5
    found, wanted = both(x, None, None, None, None, rotation, act_bits, 1.0)
    assert_same(found[1], wanted[1], "scales")
    assert_same(found[0], wanted[0], "codes")
    assert not found[1][1:4].isfinite().all(), "a row that holds NaN or inf must not look sound"
