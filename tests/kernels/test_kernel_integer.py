"""Integer group scales in family wgmma_s8 on a GPU: codes and sums over all of K bit for bit, every tile alike."""

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
    Problem,
    assert_bounded,
    assert_low_rank,
    down,
    gemm,
    integer_scales,
    problem,
    quantize,
    skip_elsewhere,
)

from omniw4 import int4, ops
from omniw4.errors import OmniW4Error
from omniw4.ops import extension, gemm_wgmma_s8
from omniw4.repack import wgmma_s8
from problems import assert_same
from shapes import Shape, full, ids

pytestmark = pytest.mark.gpu
SHAPES = full()
QUANTIZER_SHAPES = list(dict.fromkeys(Shape(s.m, 8, s.k, s.r) for s in SHAPES))
WIDE_SHAPES = [Shape(m, 8, k, r) for m, k, r in ((3, 12288, 16), (40, 14336, 32), (17, 20480, 48), (200, 32768, 16))]
EPILOGUE_SHAPES = [Shape(1, 1024, 1024), Shape(61, 6144, 1024), Shape(705, 6144, 1024), Shape(33, 72, 320, 40)]
TILE_SHAPES = [Shape(1, 256, 64, 0), Shape(17, 520, 192), Shape(300, 1024, 576, 256), Shape(705, 2048, 1088, 80)]
TILES = range(1, 22)


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_elsewhere()


def integer(shape: Shape, act_bits: int, dtype: torch.dtype = torch.float16) -> Problem:
    return problem(shape, act_bits, dtype, "integer")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*QUANTIZER_SHAPES, *WIDE_SHAPES], ids=str)
def test_the_quantizer_writes_the_layout(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    x, linear = input_on_gpu(shape.m, shape.k, dtype), integer_scales(linear_on_gpu(8, shape.k, shape.r, dtype))
    qact, a_scales, lora_act, token_scales = quantize(x, linear, act_bits)
    codes, scales, _, outer = quantize(x, linear, act_bits, "canonical")
    if act_bits == 4:
        codes, scales = int4.widen(int4.unpack_nibbles(codes), scales), outer[:, None]
    wanted, wanted_scales = wgmma_s8.pack_activations(codes, scales, 8)
    assert_same(qact, wanted, "qact")
    assert_same(a_scales, wanted_scales, "a_scales")
    assert token_scales.shape == (0,)
    if linear.proj_down is not None:
        assert_low_rank(lora_act, x, linear)


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
def test_norm_and_smoothing(rotation: str, dtype: torch.dtype, act_bits: int, scale_type: str) -> None:
    """The RMS worked out inside has the bits of the op inv_rms, whatever number of rows a block owns."""
    for m, k, rank in ((1, 64, 16), (37, 704, 32), (130, 1024, 0), (705, 3072, 16), (3000, 1024, 48)):
        x, g = input_on_gpu(m, k, dtype, seed=m), torch.Generator(DEVICE).manual_seed(k)
        inv_smooth = (torch.rand(k, generator=g, device=DEVICE) + 0.5).reciprocal()
        weight = (torch.rand(k, generator=g, device=DEVICE) + 0.5).to(dtype)
        packed = down(linear_on_gpu(8, k, rank, dtype))
        rms = ops.inv_rms(x, 1e-6)
        options = (rotation, act_bits, 0.95)
        inside = ops.quantize_lora_down(x, packed, inv_smooth, None, weight, *options, LAYOUT, scale_type, 1e-6)
        given = ops.quantize_lora_down(x, packed, inv_smooth, rms, weight, *options, LAYOUT, scale_type)
        for found, wanted in zip(inside, given, strict=True):
            assert_same(found, wanted, f"RMS worked out inside, m {m}, k {k}")
        codes, scales, _, outer = ops.quantize_lora_down_ref(x, None, inv_smooth, rms, weight, *options, scale_type)
        bits = act_bits
        if act_bits == 4:
            codes = int4.unpack_nibbles(codes)
            if scale_type == "integer":
                codes, scales, bits = int4.widen(codes, scales), outer[:, None], 8
        wanted_codes, wanted_scales = wgmma_s8.pack_activations(codes, scales, bits)
        assert_same(given[0], wanted_codes, f"codes, m {m}, k {k}")
        assert_same(given[1], wanted_scales, f"scales, m {m}, k {k}")


# 64 times the number of a cut (kernels/quantize_lora_down/launch_sm90a.cuh), and groups a block owns; 0: whole rows
CUTS = [65, 66, 68, 72, 130, 132, 134, 136, 144, 196, 204, 216, 224, 258, 260, 264, 272, 320, 384, 448]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cut_gives_the_same_bits(dtype: torch.dtype, cut: int) -> None:
    """Clusters of 2 to 16 blocks, one row tile to each or several, weights read early or not."""
    quantizer = extension.loaded(DEVICE).quantize_lora_down
    for m, k, rank in ((5, 704, 48), (300, 1024, 80), (9000, 960, 16), (40, 320, 0)):
        x, g = input_on_gpu(m, k, dtype), torch.Generator(DEVICE).manual_seed(k)
        if cut % 64 and not 2 <= -(-(-(-k // 128) * 2) // (cut % 64)) <= 16:
            continue  # one block, or more than a cluster has
        weight = (torch.rand(k, generator=g, device=DEVICE) + 0.5).to(dtype)
        packed = down(linear_on_gpu(8, k, rank, dtype)) if rank else None
        wanted = ops.quantize_lora_down(
            x, packed, None, None, weight, "hadamard64", 4, 0.95, LAYOUT, "integer", 1e-6, True
        )
        for again in range(5):
            found = [torch.full_like(t, 99) for t in wanted[:3]]
            quantizer(
                x=x.data_ptr(), inv_rms=0, norm_weight=weight.data_ptr(), inv_smooth=0,
                proj_down=0 if packed is None else packed.data_ptr(), qact=found[0].data_ptr(),
                a_scales=found[1].data_ptr(), lora_act=found[2].data_ptr(), rows=m, cols=k, row_stride=k, rank=rank,
                act_bits=4, clip=0.95, rotate=True, layout=LAYOUT, dtype=str(dtype)[6:], device=0,
                stream=torch.cuda.current_stream().cuda_stream, integer_scales=True, eps=1e-6,
                weights_ready=again % 2 == 0, cut=cut,
            )  # fmt: skip
            for one, other, name in zip(found, wanted, ("qact", "a_scales", "lora_act"), strict=False):
                assert_same(one, other, f"{name}, m {m}, k {k}, cut {cut}")


@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_edges(dtype: torch.dtype, rotation: str) -> None:
    """Zeros, ties, the smallest and the largest numbers, NaN and inf: as the reference has it."""
    x = input_on_gpu(16, 192, dtype)
    x[0] = 0
    x[1, 0], x[2, 70], x[3, 191] = float("nan"), float("inf"), float("-inf")
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).smallest_normal
    x[6] = torch.finfo(dtype).smallest_normal / 8
    x[7, :64] = torch.arange(64, device=DEVICE) / 2 - 16
    x[8] = 1e-6
    x[9, ::2], x[9, 1::2] = 3.5, -3.5
    options = (x, None, None, None, None, rotation, 4, 1.0)
    qact, a_scales, *_ = ops.quantize_lora_down(*options, LAYOUT, "integer")
    codes, scales, _, outer = ops.quantize_lora_down_ref(*options, "integer")
    wanted, wanted_scales = wgmma_s8.pack_activations(int4.widen(int4.unpack_nibbles(codes), scales), outer[:, None], 8)
    assert_same(a_scales, wanted_scales, "a_scales")
    assert_same(qact, wanted, "qact")
    assert not a_scales[1:4].isfinite().any(), "a row that holds NaN or inf must not look sound"


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_every_shape(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    p = integer(shape, act_bits, dtype)
    y = p.run()
    assert y.shape == (shape.m, shape.n)
    assert_bounded(y, p.plain(dtype), p.plain(torch.float64))


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_sums_over_all_of_k_are_exact(shape: Shape, act_bits: int) -> None:
    """All scales are a power of two. The sum is stored rounded, and then less that rounded value: 22 of its bits."""
    p = integer(Shape(shape.m, shape.n, shape.k, 0), act_bits)
    linear = replace(p.linear, row_scales=torch.full_like(p.linear.row_scales, 2.0**-12), bias=None)  # type: ignore[arg-type]
    acts = (p.acts[0], torch.ones_like(p.acts[1]), *p.acts[2:])
    weights = int4.widen(int4.unpack_nibbles(linear.qweight), linear.w_scales)
    exact = (p.codes.double() @ weights.double().T).float()  # integers below 2^53 in FP64, and below 2^24 here
    assert float(exact.abs().max()) < 2**24
    wanted = exact * 2.0**-12
    packed = wgmma_s8.pack(linear)
    y = gemm(acts, packed, linear, act_bits, torch.float16, shape.m)
    assert_same(y, wanted.half(), "sums")
    rest = gemm(acts, packed, linear, act_bits, torch.float16, shape.m, epilogue="residual", residual=-y)
    assert_same(rest, (wanted - wanted.half().float()).half(), "what rounding left")


def test_the_largest_sums_are_exact() -> None:
    weights = torch.full((16, 256), -8, dtype=torch.int8, device=DEVICE)
    weights[3], weights[5, ::2] = 7, 7
    codes = torch.full((16, 256), -128, dtype=torch.int8, device=DEVICE)
    codes[3], codes[5, ::2] = 127, 127
    linear = integer_scales(linear_on_gpu(16, 256, 0, torch.float16, False))
    whole = torch.full_like(linear.w_scales, 16)
    linear = replace(
        linear, qweight=int4.pack_nibbles(weights), w_scales=whole, row_scales=torch.full((16,), 2.0**-8, device=DEVICE)
    )
    acts = wgmma_s8.pack_activations(codes, torch.ones(16, 1, device=DEVICE), 8)
    y = gemm((*acts, codes, codes), wgmma_s8.pack(linear), linear, 8, torch.float16, 16)
    assert_same(y, (codes.float() @ (16 * weights.float()).T * 2.0**-8).half(), "the largest sums")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EPILOGUE_SHAPES, ids=str)
def test_epilogues(shape: Shape, dtype: torch.dtype, act_bits: int) -> None:
    p = integer(shape, act_bits, dtype)
    exact, plain = p.plain(torch.float64), p.plain(dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    y = p.run(epilogue="residual", residual=residual)
    assert_bounded(y, plain + residual, exact + residual.double())
    y = p.run(epilogue="swiglu")
    assert_bounded(y, F.silu(plain[:, 0::2]) * plain[:, 1::2], F.silu(exact[:, 0::2]) * exact[:, 1::2])


def test_the_tiles_are_all_known() -> None:
    tiles = extension.module().integer_tiles()
    assert len(tiles) == len(TILES)
    for tokens in (1, 16, 100, 704, 4096):
        assert (
            extension.module().integer_tile(rows=tokens, out_features=4096, in_features=1024, multiprocessors=132)
            in TILES
        )


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(shape: Shape, dtype: torch.dtype, tile: int) -> None:
    p = integer(shape, 4, dtype)
    residual = torch.randn(shape.m, shape.n, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE).to(dtype)
    for options in (
        {},
        {"epilogue": "swiglu"},
        {"epilogue": "residual", "residual": residual},
        {"weights_ready": True},
    ):
        assert_same(p.run(tile=tile, **options), p.run(tile=1, **options), f"tile {tile}, {options.keys()}")


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("rank", [0, 16, 80, 256])
def test_rows_do_not_depend_on_the_batch(rank: int, act_bits: int) -> None:
    p = integer(Shape(1400, 2048, 1088, rank), act_bits)
    whole = p.run()
    for first, count in ((0, 1), (17, 1), (1399, 1), (5, 64), (128, 129), (900, 500)):
        part = quantize(p.x[first : first + count], p.linear, act_bits)
        again = gemm(part, p.packed, p.linear, act_bits, torch.float16, count)
        assert_same(again, whole[first : first + count], f"rows {first} to {first + count}")


@pytest.mark.parametrize("tile", [0, *TILES])
@pytest.mark.parametrize("sizes", [(2048, 1024, 512), (64, 128), (192, 64, 128, 320)], ids=str)
def test_stacked_linears_keep_their_own_low_rank_branch(sizes: tuple[int, ...], tile: int) -> None:
    """Rows of several linears in one product, each with its columns of lora_act: the bits of each alone."""
    x = input_on_gpu(300, 1024, torch.float16)
    parts = [integer_scales(linear_on_gpu(n, 1024, 16, torch.float16)) for n in sizes]
    wanted = torch.cat([gemm(quantize(x, p, 4), wgmma_s8.pack(p), p, 4, torch.float16, 300) for p in parts], dim=1)
    stacked = replace(
        parts[0],
        **{
            name: torch.cat([getattr(p, name) for p in parts])
            for name in ("qweight", "w_scales", "row_scales", "proj_up", "bias")
        },
    )
    packed = wgmma_s8.pack(stacked)
    columns = wgmma_s8.pack_proj_down(torch.cat([p.proj_down for p in parts if p.proj_down is not None], dim=1))
    acts = ops.quantize_lora_down(x, columns, None, None, None, "hadamard64", 4, 0.95, LAYOUT, "integer")
    ends = torch.tensor(sizes).cumsum(0)[:-1].tolist()
    y = gemm_wgmma_s8.gemm(
        "gemm_lora_up", acts[0], acts[1], packed["qweight"], packed["w_scales"], acts[2], packed["proj_up"],
        stacked.bias, None, 300, sum(sizes), 4, "plain", torch.float16, tile, packed["row_scales"], ends,
    )  # fmt: skip
    assert_same(y, wanted, "stacked")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (3, 1, 128), (5, 1, 64), (14, 2, 64)])
@pytest.mark.parametrize("tokens", [1, 37, 300, 705])
def test_heads_in_the_epilogue_have_the_bits_of_the_op(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Norm and rotation by the GEMM or after it, with the tile that is chosen and with each that holds whole heads."""
    n = (q_heads + 2 * kv_heads) * head_dim
    p = integer(Shape(tokens, n, 1024), 4, dtype)
    cos, sin = (table.to(DEVICE) for table in ops.rope_tables(1000, head_dim, 1e6))
    q_weight, k_weight = (torch.rand(2, head_dim, device=DEVICE) + 0.5).to(dtype)
    positions = torch.randperm(1000, device=DEVICE)[:tokens]
    sizes = (q_heads, kv_heads, head_dim, 1e-6)
    wanted = p.run()
    ops.qknorm_rope(wanted, q_weight, k_weight, cos, sin, positions, *sizes)
    linear = (p.acts[0], p.acts[1], p.packed["qweight"], p.packed["w_scales"], p.acts[2], p.packed["proj_up"])
    found = ops.gemm_qknorm_rope(
        *linear, p.linear.bias, q_weight, k_weight, cos, sin, positions, *sizes, tokens, 4, dtype, LAYOUT,
        p.packed["row_scales"], None, None, True,
    )  # fmt: skip
    assert_same(found, wanted, "the tile that is chosen")
    heads = {name: t.data_ptr() for name, t in (("cos", cos), ("sin", sin), ("positions", positions))}
    heads |= {"q_weight": q_weight.data_ptr(), "k_weight": k_weight.data_ptr(), "table_rows": 1000}
    heads |= {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for tile, (features, *_) in enumerate(extension.module().integer_tiles(), start=1):
        arguments = (*linear, p.linear.bias, None, tokens, n, 4, "qknorm_rope", dtype, tile, p.packed["row_scales"])
        if features % head_dim:
            with pytest.raises(OmniW4Error, match="no kernel is compiled"):
                gemm_wgmma_s8.gemm("gemm_qknorm_rope", *arguments, eps=1e-6, **heads)
            continue
        found = gemm_wgmma_s8.gemm("gemm_qknorm_rope", *arguments, eps=1e-6, **heads)
        assert_same(found, wanted, f"tile {tile}")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_a_broken_row_stays_alone(act_bits: int) -> None:
    p = integer(Shape(80, 256, 256), act_bits)
    clean, x = p.run(), p.x.clone()
    x[7, 3], x[33, 100] = float("nan"), float("inf")
    broken = gemm(quantize(x, p.linear, act_bits), p.packed, p.linear, act_bits, torch.float16, 80)
    assert broken[7].isnan().all()
    assert broken[33].isnan().all()
    keep = [m for m in range(80) if m not in (7, 33)]
    assert_same(broken[keep], clean[keep], "rows beside the broken ones")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_every_element_is_written(act_bits: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated starts as NaN or the largest integer
    try:
        for m, n, k, rank in ((1, 8, 64, 0), (5, 24, 192, 16), (61, 200, 448, 48), (1400, 1032, 320, 16)):
            p = integer(Shape(m, n, k, rank), act_bits, torch.bfloat16)
            assert p.acts[1].isfinite().all()
            assert p.acts[2].isfinite().all()
            for tile in TILES:
                assert p.run(tile=tile).isfinite().all()
                assert p.run(tile=tile, epilogue="swiglu").isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_refusals_leave_the_process_alive() -> None:
    p = integer(Shape(5, 72, 128), 4)
    with pytest.raises(OmniW4Error, match="no kernel is compiled"):
        p.run(tile=TILES.stop)
    with pytest.raises(OmniW4Error, match="qweight has shape"):
        gemm(p.acts, {**p.packed, "row_scales": None}, p.linear, 4, torch.float16, 5)  # type: ignore[dict-item]
    with pytest.raises(OmniW4Error, match="sizes that no kernel"):
        quantize(input_on_gpu(1, 64 * 600, torch.float16), replace(p.linear, proj_down=None), 4)
    assert p.run().isfinite().all()
