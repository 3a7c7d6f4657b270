"""gemm_lora_up on a GPU: integer sums bit for bit, the result within twice the error of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    DEVICE,
    LAYOUT,
    canonical_codes,
    for_shape,
    gemm,
    in_dtype,
    input_on_gpu,
    linear_on_gpu,
    quantize,
)

from omniw4 import int4, ops, repack
from omniw4.errors import OmniW4Error
from problems import assert_same, relative_error
from shapes import Shape, full, ids

pytestmark = pytest.mark.gpu
Record = Callable[[str, object], None]
DTYPES = (torch.float16, torch.bfloat16)
SHAPES = full()
EPILOGUE_SHAPES = [Shape(1, 1024, 1024), Shape(61, 6144, 1024), Shape(705, 6144, 1024), Shape(33, 72, 320, 40)]


def assert_bounded(record: Record, name: str, found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error that plain torch makes in the same dtype; both go into the test report."""
    ours, theirs = relative_error(found, exact), relative_error(plain, exact)
    record(f"{name} error", ours)
    record(f"{name} error of plain torch", theirs)
    assert ours <= 2 * theirs + 1e-9, f"error {ours:.3g} against FP64, plain torch {theirs:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_every_shape(shape: Shape, dtype: torch.dtype, record_property: Record) -> None:
    x, linear = for_shape(shape, dtype)
    acts = quantize(x, linear)
    y = gemm(acts, linear, dtype, tokens=shape.m)
    codes, scales = canonical_codes(acts, shape.m)
    exact = in_dtype(codes, scales, acts[2], linear, torch.float64)
    assert y.shape == exact.shape
    assert_bounded(record_property, "plain", y, in_dtype(codes, scales, acts[2], linear, dtype), exact)


@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_group_sums_are_exact(shape: Shape) -> None:
    """Each column keeps one group, all scales are 1: the result is an integer sum that FP16 holds exactly."""
    x, linear = for_shape(Shape(shape.m, shape.n, shape.k, 0), torch.float16)
    qact, a_scales, lora_act = quantize(x, linear)
    groups = shape.k // 64
    for first in {0, groups - 1, groups // 2}:
        kept = (torch.arange(shape.n, device=DEVICE) + first) % groups
        one = F.one_hot(kept, groups).half()  # [N, K/64]
        y = gemm((qact, torch.ones_like(a_scales), lora_act), replace(linear, w_scales=one, bias=None), torch.float16,
                 tokens=shape.m)  # fmt: skip
        codes, _ = canonical_codes((qact, a_scales, lora_act), shape.m)
        weights = int4.split_groups(int4.unpack_nibbles(linear.qweight)).float() * one.float()[..., None]
        wanted = codes.float() @ weights.flatten(1).T  # integers below 2^24: exact in any order
        assert wanted.abs().max() <= 2048, "FP16 does not hold such sums exactly: the test is void"
        assert_same(y, wanted.half(), f"group sums from group {first} on")


def test_the_largest_sums_are_exact() -> None:
    codes = torch.full((16, 256), -8, dtype=torch.int8, device=DEVICE)
    codes[3], codes[5, ::2] = 7, 7
    packed = int4.pack_nibbles(codes)
    half = torch.full((16, 4), 0.5, device=DEVICE).half()
    qact, scales = repack.get(LAYOUT).pack_activations(packed, half)  # type: ignore[attr-defined]
    linear = replace(linear_on_gpu(16, 256, 0, torch.float16, False), qweight=packed, w_scales=half)
    y = gemm((qact, scales, qact), linear, torch.float16, tokens=16)
    assert_same(y, (codes.float() @ codes.float().T / 4).half(), "sums of the largest codes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EPILOGUE_SHAPES, ids=str)
def test_epilogues(shape: Shape, dtype: torch.dtype, record_property: Record) -> None:
    x, linear = for_shape(shape, dtype)
    acts = quantize(x, linear)
    codes, scales = canonical_codes(acts, shape.m)
    exact = in_dtype(codes, scales, acts[2], linear, torch.float64)
    plain = in_dtype(codes, scales, acts[2], linear, dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    y = gemm(acts, linear, dtype, epilogue="residual", residual=residual, tokens=shape.m)
    assert_bounded(record_property, "residual", y, plain + residual, exact + residual.double())
    y = gemm(acts, linear, dtype, epilogue="swiglu", tokens=shape.m)
    assert_bounded(
        record_property, "swiglu", y, F.silu(plain[:, 0::2]) * plain[:, 1::2], F.silu(exact[:, 0::2]) * exact[:, 1::2]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 16, 80, 256])
def test_rows_do_not_depend_on_the_batch_or_the_tile(rank: int, dtype: torch.dtype) -> None:
    """1 to 64 rows take the small tile, 1400 the large one."""
    x, linear = for_shape(Shape(1400, 2048, 1088, rank), dtype)
    packed = repack.get(LAYOUT).pack(linear)
    acts = quantize(x, linear)
    whole = gemm(acts, linear, dtype, tokens=1400, packed=packed)
    for first, count in ((0, 1), (17, 1), (1399, 1), (5, 64), (128, 129), (900, 500)):
        part = x[first : first + count]
        again = gemm(quantize(part, linear), linear, dtype, tokens=count, packed=packed)
        assert_same(again, whole[first : first + count], f"rows {first} to {first + count}")


def test_packed_low_rank_activations_give_the_same_bits() -> None:
    for m, dtype in ((1, torch.float16), (61, torch.bfloat16), (1400, torch.float16)):
        x, linear = for_shape(Shape(m, 1024, 512, 32), dtype)
        qact, a_scales, lora_act = quantize(x, linear)
        one = gemm((qact, a_scales, lora_act), linear, dtype, tokens=m)
        two = gemm((qact, a_scales, ops.pack_lora_act(lora_act, dtype)), linear, dtype, tokens=m)
        assert_same(two, one, f"m {m}")


def test_a_broken_row_stays_alone() -> None:
    x, linear = for_shape(Shape(80, 256, 256), torch.float16)
    clean = gemm(quantize(x, linear), linear, torch.float16, tokens=80)
    x[7, 3], x[33, 100] = float("nan"), float("inf")
    broken = gemm(quantize(x, linear), linear, torch.float16, tokens=80)
    assert broken[7].isnan().all()
    assert broken[33].isnan().all()
    keep = [m for m in range(80) if m not in (7, 33)]
    assert_same(broken[keep], clean[keep], "rows beside the broken ones")


def test_refusals_leave_the_process_alive() -> None:
    x, linear = for_shape(Shape(5, 72, 128), torch.float16)
    acts = quantize(x, linear)
    with pytest.raises(OmniW4Error, match="N 12"):
        gemm(acts, replace(linear, qweight=linear.qweight[:12], w_scales=linear.w_scales[:12],
                           proj_up=linear.proj_up[:12], bias=linear.bias[:12]), torch.float16, tokens=5)  # fmt: skip
    with pytest.raises(OmniW4Error, match="has shape"):
        gemm(acts, linear, torch.float16, tokens=70)
    packed = repack.get(LAYOUT).pack(linear)
    operands = (acts[0], acts[1], packed["qweight"], packed["w_scales"], None, None, None, None, 5, 72, 4, "plain")
    with pytest.raises(OmniW4Error, match="no GEMM kernel reads layout 'mma_s5'"):
        ops.gemm_lora_up(*operands, torch.float16, "mma_s5")
    with pytest.raises(OmniW4Error, match="a_scales has dtype float16, wanted float32"):
        ops.gemm_lora_up(*operands, torch.float16, "mma_s8")
    whole = packed["w_scales"].to(torch.uint8)
    integer = (acts[0], acts[1].to(torch.uint8), packed["qweight"], whole, *operands[4:])
    with pytest.raises(OmniW4Error, match="'mma_s4' takes no integer group scales") as refused:
        ops.gemm_lora_up(*integer, torch.float16, LAYOUT, torch.ones(72, device=DEVICE))
    assert "'mma_s8'" in refused.value.hint
    assert gemm(acts, linear, torch.float16, tokens=5).isfinite().all()
    empty = input_on_gpu(0, 128, torch.float16)
    assert gemm(quantize(empty, linear), linear, torch.float16, tokens=0).shape == (0, 72)
