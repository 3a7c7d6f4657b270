"""Family wgmma_s8 on a GPU: codes and integer sums bit for bit, the result within twice the error of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, input_on_gpu, linear_on_gpu
from wgmma_cases import (
    ACT_BITS,
    DTYPES,
    LAYOUT,
    TILES,
    assert_bounded,
    assert_low_rank,
    gemm,
    problem,
    quantize,
    skip_elsewhere,
)

from omniw4 import int4, ops
from omniw4.errors import OmniW4Error
from omniw4.repack import wgmma_s8
from problems import assert_same
from shapes import Shape, full, ids

pytestmark = pytest.mark.gpu
SHAPES = full()
QUANTIZER_SHAPES = list(dict.fromkeys(Shape(s.m, 8, s.k, s.r) for s in SHAPES))
EPILOGUE_SHAPES = [Shape(1, 1024, 1024), Shape(61, 6144, 1024), Shape(705, 6144, 1024), Shape(33, 72, 320, 40)]
TILE_SHAPES = [Shape(1, 256, 64, 0), Shape(17, 512, 192), Shape(300, 1024, 576, 256), Shape(705, 2048, 1088, 80)]


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_elsewhere()


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", QUANTIZER_SHAPES, ids=ids(QUANTIZER_SHAPES))
def test_the_quantizer_writes_the_layout(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    """Codes, scales and zeros of padding as the reference has them."""
    x, linear = input_on_gpu(shape.m, shape.k, dtype), linear_on_gpu(8, shape.k, shape.r, dtype)
    qact, a_scales, lora_act, _ = quantize(x, linear, act_bits)
    wanted, wanted_scales, *_ = ops.quantize_lora_down_ref(x, None, None, None, None, "hadamard64", act_bits, 0.95)
    codes = int4.unpack_nibbles(wanted) if act_bits == 4 else wanted
    packed, packed_scales = wgmma_s8.pack_activations(codes, wanted_scales, act_bits)
    assert_same(qact, packed, "qact")
    assert_same(a_scales, packed_scales, "a_scales")
    if linear.proj_down is not None:
        assert_low_rank(lora_act, x, linear)
    found, found_scales = wgmma_s8.unpack_activations(qact, a_scales, shape.m, shape.k)
    assert_same(found, codes, "codes unpacked")
    assert_same(found_scales, wanted_scales, "scales unpacked")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_every_shape(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    p = problem(shape, act_bits, dtype)
    y = p.run()
    assert y.shape == (shape.m, shape.n)
    assert_bounded(y, p.plain(dtype), p.plain(torch.float64))


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_integer_sums_are_exact(shape: Shape, act_bits: int) -> None:
    """Each column keeps one group, all scales are 1, so FP32 holds the sum. It is stored rounded, and then less that
    rounded value, which leaves a remainder that FP16 holds: together every bit of the sum."""
    p = problem(Shape(shape.m, shape.n, shape.k, 0), act_bits, torch.float16)
    groups = shape.k // 64
    acts = (p.acts[0], torch.ones_like(p.acts[1]), *p.acts[2:])
    for first in {0, groups - 1, groups // 2}:
        kept = (torch.arange(shape.n, device=DEVICE) + first) % groups
        one = F.one_hot(kept, groups).half()  # [N, K/64]
        linear = replace(p.linear, w_scales=one, bias=None)
        packed = wgmma_s8.pack(linear)
        weights = int4.split_groups(int4.unpack_nibbles(linear.qweight)).float() * one.float()[..., None]
        wanted = p.codes.float() @ weights.flatten(1).T  # integers below 2^24: exact in any order
        y = gemm(acts, packed, linear, act_bits, torch.float16, shape.m)
        assert_same(y, wanted.half(), f"group sums from group {first} on")
        rest = gemm(acts, packed, linear, act_bits, torch.float16, shape.m, epilogue="residual", residual=-y)
        assert_same(rest, (wanted - wanted.half().float()).half(), f"what rounding left, from group {first} on")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_the_largest_sums_are_exact(act_bits: int) -> None:
    limit = 1 << (act_bits - 1)
    weights = torch.full((16, 256), -8, dtype=torch.int8, device=DEVICE)
    weights[3], weights[5, ::2] = 7, 7
    codes = torch.full((16, 256), -limit, dtype=torch.int8, device=DEVICE)
    codes[3], codes[5, ::2] = limit - 1, limit - 1
    half = torch.full((16, 4), 0.5, device=DEVICE).half()
    acts = wgmma_s8.pack_activations(codes, half if act_bits == 4 else half[:, :1] / 16, act_bits)
    linear = replace(linear_on_gpu(16, 256, 0, torch.float16, False), qweight=int4.pack_nibbles(weights), w_scales=half)
    y = gemm((*acts, codes), wgmma_s8.pack(linear), linear, act_bits, torch.float16, 16)
    assert_same(y, (codes.float() @ weights.float().T / (4 if act_bits == 4 else 64)).half(), "the largest sums")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [Shape(s.m, s.n, s.k, 0) for s in EPILOGUE_SHAPES], ids=str)
def test_the_same_bits_as_mma_s4(shape: Shape, dtype: torch.dtype) -> None:
    """Without a low-rank branch both round once a group, in the order of K."""
    p = problem(shape, 4, dtype)
    other = ops.quantize_lora_down(p.x, None, None, None, None, "hadamard64", 4, 0.95, "mma_s4")
    from omniw4.repack import mma_s4

    packed = mma_s4.pack(p.linear)
    wanted = ops.gemm_lora_up(
        other[0], other[1], packed["qweight"], packed["w_scales"], None, None, p.linear.bias, None, shape.m, shape.n,
        4, "plain", dtype, "mma_s4",
    )  # fmt: skip
    assert_same(p.run(), wanted, "mma_s4")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EPILOGUE_SHAPES, ids=str)
def test_epilogues(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    p = problem(shape, act_bits, dtype)
    exact, plain = p.plain(torch.float64), p.plain(dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    y = p.run(epilogue="residual", residual=residual)
    assert_bounded(y, plain + residual, exact + residual.double())
    y = p.run(epilogue="swiglu")
    assert_bounded(y, F.silu(plain[:, 0::2]) * plain[:, 1::2], F.silu(exact[:, 0::2]) * exact[:, 1::2])


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    p = problem(shape, act_bits, dtype)
    wanted = p.run()
    for tile in TILES:
        assert_same(p.run(tile=tile), wanted, f"tile {tile}")
        swiglu = p.run(tile=tile, epilogue="swiglu")
        assert_same(swiglu, p.run(epilogue="swiglu"), f"tile {tile}, swiglu")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("rank", [0, 16, 80, 256])
def test_rows_do_not_depend_on_the_batch(rank: int, act_bits: int) -> None:
    p = problem(Shape(1400, 2048, 1088, rank), act_bits, torch.float16)
    whole = p.run()
    for first, count in ((0, 1), (17, 1), (1399, 1), (5, 64), (128, 129), (900, 500)):
        part = quantize(p.x[first : first + count], p.linear, act_bits)
        again = gemm(part, p.packed, p.linear, act_bits, torch.float16, count)
        assert_same(again, whole[first : first + count], f"rows {first} to {first + count}")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_a_broken_row_stays_alone(act_bits: int) -> None:
    p = problem(Shape(80, 256, 256), act_bits, torch.float16)
    clean, x = p.run(), p.x.clone()
    x[7, 3], x[33, 100] = float("nan"), float("inf")
    broken = gemm(quantize(x, p.linear, act_bits), p.packed, p.linear, act_bits, torch.float16, 80)
    assert broken[7].isnan().all()
    assert broken[33].isnan().all()
    keep = [m for m in range(80) if m not in (7, 33)]
    assert_same(broken[keep], clean[keep], "rows beside the broken ones")


def test_heads_are_normalised_and_turned_after_the_gemm() -> None:
    p = problem(Shape(37, 4096, 1024), 4, torch.bfloat16)
    cos, sin = (table.to(DEVICE) for table in ops.rope_tables(64, 128, 1e6))
    weight, positions = torch.rand(128, device=DEVICE).bfloat16(), torch.arange(37, device=DEVICE)
    found = ops.gemm_qknorm_rope(
        p.acts[0], p.acts[1], p.packed["qweight"], p.packed["w_scales"], p.acts[2], p.packed["proj_up"], p.linear.bias,
        weight, weight, cos, sin, positions, 16, 8, 128, 1e-6, 37, 4, torch.bfloat16, LAYOUT,
    )  # fmt: skip
    wanted = p.run()
    ops.qknorm_rope(wanted, weight, weight, cos, sin, positions, 16, 8, 128, 1e-6)
    assert_same(found, wanted, "heads")


def test_refusals_leave_the_process_alive() -> None:
    p = problem(Shape(5, 72, 128), 4, torch.float16)
    up = p.packed["proj_up"]
    arguments = (p.packed["qweight"], p.packed["w_scales"], p.acts[2], up, p.linear.bias, None)

    def run(qact: torch.Tensor, tokens: int, n: int, act_bits: int) -> torch.Tensor:
        return ops.gemm_lora_up(qact, p.acts[1], *arguments, tokens, n, act_bits, "plain", torch.float16, LAYOUT)

    for tokens, n, act_bits, message in (
        (70, 72, 4, "qact has shape"), (5, 72, 8, "a_scales has shape"), (5, 200, 4, "bias has shape"),
        (5, 72, 16, "no activation layout"),
    ):  # fmt: skip
        with pytest.raises(OmniW4Error, match=message):
            run(p.acts[0], tokens, n, act_bits)
    with pytest.raises(OmniW4Error, match="no kernel is compiled"):
        p.run(tile=4)  # 256 features do not divide N' = 128
    assert run(p.acts[0], 5, 72, 4).isfinite().all()
    empty = quantize(p.x[:0], p.linear, 4)
    assert gemm(empty, p.packed, p.linear, 4, torch.float16, 0).shape == (0, 72)
