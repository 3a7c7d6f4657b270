"""Family mma_s8 on a GPU: codes and integer sums bit for bit, the result within twice the error of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, input_on_gpu, linear_on_gpu
from mma_s8_cases import DTYPES, KINDS, LAYOUT, TILES, packed_activations, problem, quantize
from wgmma_cases import assert_bounded, integer_scales

from omniw4 import int4, ops, repack
from omniw4.errors import OmniW4Error
from omniw4.ops import gemm_wgmma_s8
from omniw4.repack import mma_s8, wgmma_s8
from problems import assert_same
from shapes import Shape, full, ids

pytestmark = pytest.mark.gpu
SHAPES = full()
QUANTIZER_SHAPES = list(dict.fromkeys(Shape(s.m, 8, s.k, s.r) for s in SHAPES))
EPILOGUE_SHAPES = [Shape(1, 1024, 1024), Shape(61, 6144, 1024), Shape(705, 6144, 1024), Shape(33, 72, 320, 40)]
TILE_SHAPES = [Shape(1, 256, 64, 0), Shape(17, 520, 192), Shape(300, 1024, 576, 256), Shape(705, 2048, 1088, 80)]
by_kind = pytest.mark.parametrize(("scale_type", "act_bits"), KINDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


@by_kind
@by_dtype
@pytest.mark.parametrize("shape", QUANTIZER_SHAPES, ids=ids(QUANTIZER_SHAPES))
def test_the_quantizer_writes_the_layout(shape: Shape, dtype: torch.dtype, scale_type: str, act_bits: int) -> None:
    x, linear = input_on_gpu(shape.m, shape.k, dtype), linear_on_gpu(8, shape.k, shape.r, dtype)
    if scale_type == "integer":
        linear = integer_scales(linear)
    qact, a_scales, lora_act, token_scales = quantize(x, linear, act_bits)
    canonical = quantize(x, linear, act_bits, "canonical")
    wanted, wanted_scales = packed_activations(canonical, act_bits, scale_type)
    assert_same(qact, wanted, "qact")
    assert_same(a_scales, wanted_scales, "a_scales")
    assert token_scales.shape == (0,)
    if linear.proj_down is not None:
        rotated = ops.transform(x, None, None, None, "hadamard64")
        exact = rotated.double() @ linear.proj_down.double()
        assert_bounded(lora_act, rotated.to(x.dtype) @ linear.proj_down, exact)


@by_kind
@by_dtype
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
def test_norm_smoothing_and_values_at_the_edges(
    rotation: str, dtype: torch.dtype, scale_type: str, act_bits: int
) -> None:
    for m, k in ((1, 64), (37, 704), (130, 1024)):
        x, g = input_on_gpu(m, k, dtype, seed=m), torch.Generator(DEVICE).manual_seed(k)
        if m > 16:
            x[1, 0], x[2, 40], x[3, k - 1] = float("nan"), float("inf"), float("-inf")
            x[4], x[5] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
            x[6], x[8] = torch.finfo(dtype).smallest_normal / 8, 1e-6
            x[9, ::2], x[9, 1::2] = 3.5, -3.5
        inv_smooth = (torch.rand(k, generator=g, device=DEVICE) + 0.5).reciprocal()
        weight = (torch.rand(k, generator=g, device=DEVICE) + 0.5).to(dtype)
        for smooth, rms, norm in ((None, None, None), (inv_smooth, ops.inv_rms(x, 1e-6), weight)):
            options = (x, None, smooth, rms, norm, rotation, act_bits, 0.95)
            qact, a_scales, *_ = ops.quantize_lora_down(*options, LAYOUT, scale_type)
            canonical = ops.quantize_lora_down_ref(*options, scale_type)
            wanted, wanted_scales = packed_activations(canonical, act_bits, scale_type)
            assert_same(a_scales, wanted_scales, f"scales, m {m}, k {k}")
            assert_same(qact, wanted, f"codes, m {m}, k {k}")


@by_kind
@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_every_shape(shape: Shape, dtype: torch.dtype, scale_type: str, act_bits: int) -> None:
    p = problem(shape, scale_type, act_bits, dtype)
    y = p.run()
    assert y.shape == (shape.m, shape.n)
    assert_bounded(y, p.plain(dtype), p.plain(torch.float64))


@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_sums_over_all_of_k_are_exact(shape: Shape, act_bits: int) -> None:
    """All scales are a power of two. The sum is stored rounded, and then less that rounded value: 22 of its bits."""
    p = problem(Shape(shape.m, shape.n, shape.k, 0), "integer", act_bits)
    p.linear = replace(p.linear, row_scales=torch.full_like(p.linear.row_scales, 2.0**-12), bias=None)  # type: ignore[arg-type]
    p.packed = mma_s8.pack(p.linear)
    acts = (p.acts[0], torch.ones_like(p.acts[1]), *p.acts[2:])
    weights = int4.widen(int4.unpack_nibbles(p.linear.qweight), p.linear.w_scales)
    exact = (p.acts[0].double() @ weights.double().T).float()  # integers below 2^53 in FP64, and below 2^24 here
    assert float(exact.abs().max()) < 2**24
    wanted = exact * 2.0**-12
    y = p.run(acts)
    assert_same(y, wanted.half(), "sums")
    rest = p.run(acts, epilogue="residual", residual=-y)
    assert_same(rest, (wanted - wanted.half().float()).half(), "what rounding left")


@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_group_sums_are_exact(shape: Shape, act_bits: int) -> None:
    """Each column keeps one group, all scales are 2^-4: the result is an integer sum that FP32 holds, rounded once."""
    p = problem(Shape(shape.m, shape.n, shape.k, 0), "float16", act_bits)
    groups = shape.k // 64
    acts = (p.acts[0], torch.full_like(p.acts[1], 0.25), *p.acts[2:])
    for first in {0, groups - 1, groups // 2}:
        kept = (torch.arange(shape.n, device=DEVICE) + first) % groups
        one = F.one_hot(kept, groups).half() / 4  # [N, K/64]
        p.linear = replace(p.linear, w_scales=one, bias=None)
        p.packed = mma_s8.pack(p.linear)
        weights = int4.split_groups(int4.unpack_nibbles(p.linear.qweight)).float() * (one.float() * 4)[..., None]
        wanted = p.acts[0].float() @ weights.flatten(1).T / 16  # integers below 2^24: exact in any order
        assert_same(p.run(acts), wanted.half(), f"group sums from group {first} on")


@pytest.mark.parametrize("scale_type", ["integer", "float16"])
def test_the_largest_sums_are_exact(scale_type: str) -> None:
    weights = torch.full((16, 256), -8, dtype=torch.int8, device=DEVICE)
    weights[3], weights[5, ::2] = 7, 7
    codes = torch.full((16, 256), -128, dtype=torch.int8, device=DEVICE)
    codes[3], codes[5, ::2] = 127, 127
    p = problem(Shape(16, 16, 256, 0), scale_type, 8)
    scales = torch.full_like(p.linear.w_scales, 16 if scale_type == "integer" else 2.0**-4)
    rows = None if p.linear.row_scales is None else torch.full((16,), 2.0**-8, device=DEVICE)
    p.linear = replace(p.linear, qweight=int4.pack_nibbles(weights), w_scales=scales, row_scales=rows, bias=None)
    p.packed = mma_s8.pack(p.linear)
    one = torch.ones(16, 1, device=DEVICE)
    acts = mma_s8.pack_activations(codes, one if scale_type == "integer" else one.half(), 8)
    y = p.run((*acts, codes, codes))
    assert_same(y, (codes.float() @ weights.float().T * 2.0**-4).half(), "the largest sums")


@by_kind
@by_dtype
@pytest.mark.parametrize("shape", EPILOGUE_SHAPES, ids=str)
def test_epilogues(shape: Shape, dtype: torch.dtype, scale_type: str, act_bits: int) -> None:
    p = problem(shape, scale_type, act_bits, dtype)
    exact, plain = p.plain(torch.float64), p.plain(dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    y = p.run(epilogue="residual", residual=residual)
    assert_bounded(y, plain + residual, exact + residual.double())
    y = p.run(epilogue="swiglu")
    assert_bounded(y, F.silu(plain[:, 0::2]) * plain[:, 1::2], F.silu(exact[:, 0::2]) * exact[:, 1::2])


@by_kind
@by_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (3, 1, 64), (1, 1, 64)])
def test_heads_in_the_epilogue_have_the_bits_of_two_ops(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale_type: str, act_bits: int
) -> None:
    n = (heads + 2 * kv_heads) * head_dim
    for m in (1, 37, 705):
        p = problem(Shape(m, n, 320), scale_type, act_bits, dtype)
        cos, sin = (table.to(DEVICE) for table in ops.rope_tables(1024, head_dim, 1e6))
        g = torch.Generator(DEVICE).manual_seed(m)
        positions = torch.randint(0, 1024, (m,), generator=g, device=DEVICE)
        weights = [(torch.rand(head_dim, generator=g, device=DEVICE) + 0.5).to(dtype) for _ in range(2)]
        linear = (*p.acts[:2], p.packed["qweight"], p.packed["w_scales"], p.acts[2], p.packed["proj_up"], p.linear.bias)
        tables = (*weights, cos, sin, positions, heads, kv_heads, head_dim, 1e-6)
        y = ops.gemm_qknorm_rope(*linear, *tables, m, act_bits, dtype, LAYOUT, p.packed.get("row_scales"))
        wanted = p.run()
        ops.qknorm_rope(wanted, *tables)
        assert_same(y, wanted, f"m {m}")


@by_kind
@by_dtype
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(shape: Shape, dtype: torch.dtype, scale_type: str, act_bits: int) -> None:
    p = problem(shape, scale_type, act_bits, dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    for options in ({}, {"epilogue": "swiglu"}, {"epilogue": "residual", "residual": residual}):
        found = [p.run(tile=tile, **options) for tile in TILES]  # type: ignore[arg-type]
        for y in found[1:]:
            assert_same(y, found[0], f"{options.keys()}")


@by_kind
@pytest.mark.parametrize("rank", [0, 16, 80, 256])
def test_rows_do_not_depend_on_the_batch(rank: int, scale_type: str, act_bits: int) -> None:
    p = problem(Shape(1400, 2048, 1088, rank), scale_type, act_bits)
    whole = p.run()
    for first, count in ((0, 1), (17, 1), (1399, 1), (5, 64), (128, 129), (900, 500)):
        again = p.run(quantize(p.x[first : first + count], p.linear, act_bits), tokens=count)
        assert_same(again, whole[first : first + count], f"rows {first} to {first + count}")


@by_dtype
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_the_bits_of_the_other_families(shape: Shape, dtype: torch.dtype) -> None:
    """Without a low-rank branch, whose FP32 sums the instructions take in orders of their own."""
    shape = Shape(shape.m, shape.n, shape.k, 0)
    p = problem(shape, "float16", 4, dtype)
    packed = repack.get("mma_s4").pack(p.linear)
    acts = quantize(p.x, p.linear, 4, "mma_s4")
    y = ops.gemm_lora_up(
        acts[0], acts[1], packed["qweight"], packed["w_scales"], None, None, p.linear.bias, None, shape.m, shape.n, 4,
        "plain", dtype, "mma_s4",
    )  # fmt: skip
    assert_same(p.run(), y, "mma_s4")
    if gemm_wgmma_s8.runs(DEVICE, 4):
        for act_bits in (4, 8):
            p = problem(shape, "integer", act_bits, dtype)
            packed, acts = wgmma_s8.pack(p.linear), quantize(p.x, p.linear, act_bits, "wgmma_s8")
            y = ops.gemm_lora_up(
                acts[0], acts[1], packed["qweight"], packed["w_scales"], None, None, p.linear.bias, None, shape.m,
                shape.n, act_bits, "plain", dtype, "wgmma_s8", packed["row_scales"],
            )  # fmt: skip
            assert_same(p.run(), y, f"wgmma_s8, {act_bits} bits")


def test_packed_low_rank_activations_give_the_same_bits() -> None:
    for m, dtype in ((1, torch.float16), (61, torch.bfloat16), (1400, torch.float16)):
        p = problem(Shape(m, 1024, 512, 32), "integer", 4, dtype)
        packed = ops.pack_lora_act(p.acts[2], dtype)
        assert_same(p.run((*p.acts[:2], packed, p.acts[3])), p.run(), f"m {m}")


@by_kind
def test_a_broken_row_stays_alone(scale_type: str, act_bits: int) -> None:
    p = problem(Shape(80, 256, 256), scale_type, act_bits)
    clean, x = p.run(), p.x.clone()
    x[7, 3], x[33, 100] = float("nan"), float("inf")
    broken = p.run(quantize(x, p.linear, act_bits))
    assert broken[7].isnan().all()
    assert broken[33].isnan().all()
    keep = [m for m in range(80) if m not in (7, 33)]
    assert_same(broken[keep], clean[keep], "rows beside the broken ones")


@by_kind
def test_every_element_is_written(scale_type: str, act_bits: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated starts as NaN or the largest integer
    try:
        for m, n, k, rank in ((1, 8, 64, 0), (5, 24, 192, 16), (61, 200, 448, 48), (1400, 1032, 320, 16)):
            p = problem(Shape(m, n, k, rank), scale_type, act_bits, torch.bfloat16)
            assert p.acts[1].isfinite().all()
            assert p.acts[2].isfinite().all()
            for tile in TILES:
                assert p.run(tile=tile).isfinite().all()
                assert p.run(tile=tile, epilogue="swiglu").isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_refusals_leave_the_process_alive() -> None:
    p = problem(Shape(5, 72, 128), "integer", 4)
    with pytest.raises(OmniW4Error, match="no kernel is compiled"):
        p.run(tile=32)
    with pytest.raises(OmniW4Error, match="a_scales has shape"):
        replace(p, packed={**p.packed, "row_scales": None}).run()  # type: ignore[dict-item]
    with pytest.raises(OmniW4Error, match="qact has shape"):
        p.run(tokens=70)
    assert p.run().isfinite().all()
    empty = quantize(input_on_gpu(0, 128, torch.float16), p.linear, 4)
    assert p.run(empty, tokens=0).shape == (0, 72)
