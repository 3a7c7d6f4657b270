"""The kernels of family wgmma_s8 on a CPU, instructions emulated: codes and sums as the references have them, every
tile and every cut of the quantizer, and no thread that waits for ever. What only a GPU shows is in tests/kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import build_emulation as build
import pytest
import torch
import torch.nn.functional as F

from omniw4 import int4, ops
from omniw4.ops.layouts import activation_shapes, lora_act_shape
from omniw4.repack import wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, relative_error

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
HALF = torch.float16
TILES = range(1, 14)
EPILOGUES = {"plain": 0, "residual": 1, "swiglu": 2, "qknorm_rope": 3}


@cache
def emulated() -> ModuleType:
    return build.load()


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def quantize(
    x: torch.Tensor,
    down: torch.Tensor | None = None,
    *,
    bits: int = 4,
    scale_type: str = "integer",
    inv_rms: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    inv_smooth: torch.Tensor | None = None,
    rotate: bool = True,
    cut: int = 0,
    weights_ready: bool = False,
    clip: float = 0.95,
    multiprocessors: int = 132,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qact, a_scales and lora_act as the kernel leaves them, over memory full of other things."""
    m, k = x.shape
    packed = None if down is None else wgmma_s8.pack_proj_down(F.pad(down, (0, -down.shape[1] % 16)))
    rank = 0 if packed is None else packed.shape[1] * 16
    shapes = activation_shapes(wgmma_s8.LAYOUT, m, k, bits, x.dtype, scale_type)
    qact, a_scales = torch.full(shapes.qact, 99, dtype=torch.int8), torch.full(shapes.a_scales, float("nan"))
    lora_act = torch.full(lora_act_shape(wgmma_s8.LAYOUT, m, rank, x.dtype)[0], float("nan"), dtype=x.dtype)
    status = emulated().quantize(
        address(x), address(inv_rms), address(norm), address(inv_smooth), address(packed), address(qact),
        address(a_scales), address(lora_act), m, k, rank, bits, clip, rotate, scale_type == "integer" and bits == 4, 1e-6,
        cut, weights_ready, x.dtype == torch.bfloat16, multiprocessors,
    )  # fmt: skip
    assert status == 0
    return qact, a_scales, lora_act


def wanted_codes(
    x: torch.Tensor, bits: int, scale_type: str, inv_smooth: torch.Tensor | None, *norm: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    options = (x, None, inv_smooth, *(norm or (None, None)), "hadamard64", bits, 0.95, scale_type)
    codes, scales, _, outer = ops.quantize_lora_down_ref(*options)  # type: ignore[arg-type]
    if bits == 8:
        return wgmma_s8.pack_activations(codes, scales, 8)
    codes = int4.unpack_nibbles(codes)
    if scale_type == "float16":
        return wgmma_s8.pack_activations(codes, scales, 4)
    return wgmma_s8.pack_activations(int4.widen(codes, scales), outer[:, None], 8)


def inputs(m: int, k: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(m + k + rank)
    x = torch.randn(m, k, generator=g)
    x[:, k // 3] *= 20
    if m > 2:
        x[1], x[2, :64] = 0, 0
    return x.half(), (torch.randn(k, rank, generator=g) * k**-0.5).half() if rank else None


# Rows and columns by which launch_rank takes each cut: few rows, some, many; short rows, long ones, rows read twice
CUTS = [
    (1, 64, 0), (5, 192, 16), (17, 1024, 16), (3, 6144, 16), (20, 704, 40), (130, 320, 16), (131, 2304, 16),
    (140, 576, 33), (1030, 128, 16), (1025, 1088, 0), (1025, 128, 32), (130, 8256, 0), (130, 2112, 20),
]  # fmt: skip


@pytest.mark.parametrize(("m", "k", "rank"), CUTS)
def test_the_quantizer_writes_what_the_reference_does(m: int, k: int, rank: int) -> None:
    x, down = inputs(m, k, rank)
    qact, a_scales, lora_act = quantize(x, down)
    codes, scales = wanted_codes(x, 4, "integer", None)
    assert_same(qact, codes, "qact")
    assert_same(a_scales, scales, "a_scales")
    if down is None:
        return
    padded = wgmma_s8.unpack_lora_act(lora_act, -(-m // 16) * 16, -(-rank // 16) * 16)
    assert not padded[m:].any()
    assert not padded[:, rank:].any()
    rotated = ops.transform(x, None, None, None, "hadamard64")
    exact = rotated.double() @ down.double()
    assert relative_error(padded[:m, :rank], exact) <= 2 * relative_error(rotated.half() @ down, exact)
    some = slice(max(0, m - 5), m)
    alone = quantize(x[some].contiguous(), down)[2]
    assert_same(wgmma_s8.unpack_lora_act(alone, m - some.start, rank), padded[some, :rank], "the last rows alone")


@pytest.mark.parametrize(("bits", "scale_type"), [(4, "integer"), (8, "integer"), (4, "float16")])
def test_every_grid_with_norm_and_smoothing(bits: int, scale_type: str) -> None:
    for m, k in ((19, 320), (130, 576)) if scale_type == "float16" else ((130, 704),):
        x, _ = inputs(m, k, 0)
        g = torch.Generator().manual_seed(k)
        norm, inv_smooth = (torch.rand(k, generator=g) + 0.5).half(), (torch.rand(k, generator=g) + 0.5).reciprocal()
        rms = ops.inv_rms_ref(x, 1e-6)
        found = quantize(x, bits=bits, scale_type=scale_type, inv_rms=rms, norm=norm, inv_smooth=inv_smooth)
        codes, scales = wanted_codes(x, bits, scale_type, inv_smooth, rms, norm)
        assert_same(found[0], codes, f"qact at {m}x{k}")
        assert_same(found[1], scales, f"a_scales at {m}x{k}")
        inside = quantize(x, bits=bits, scale_type=scale_type, norm=norm, inv_smooth=inv_smooth)
        differ = (inside[0] != codes).float().mean()
        assert differ < 2e-3, f"RMS worked out inside: {differ:.2%} of the codes differ"  # its last bit may


def test_values_at_the_edges() -> None:
    x, _ = inputs(16, 192, 0)
    x[0] = 0
    x[1, 0], x[2, 70], x[3, 191] = float("nan"), float("inf"), float("-inf")
    x[4], x[5], x[6] = 65504, 6.1e-5, 6e-8
    x[9, ::2], x[9, 1::2] = 3.5, -3.5
    qact, a_scales, _ = quantize(x)
    codes, scales = wanted_codes(x, 4, "integer", None)
    assert_same(qact, codes, "qact")
    assert_same(a_scales, scales, "a_scales")


def gemm(
    m: int,
    n: int,
    k: int,
    rank: int,
    tile: int,
    *,
    epilogue: str = "plain",
    ends: Sequence[int] = (),
    weights_ready: bool = False,
    multiprocessors: int = 132,
    heads: Sequence[int] = (),
) -> torch.Tensor:
    """One product, held against FP64; with heads in its epilogue it is not."""
    g = torch.Generator().manual_seed(m + n + k + rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).half()

    linear = QuantizedLinear(
        LinearSpec(rank=rank, scale_type="integer"),
        torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
        torch.randint(0, 17, (n, k // 64), generator=g, dtype=torch.uint8),
        normal(k, rank) if rank else None,
        normal(n, rank) if rank else None,
        bias=normal(n),
        row_scales=torch.rand(n, generator=g) * 1e-3,
    )
    packed = wgmma_s8.pack(linear)
    codes = torch.randint(-128, 128, (m, k), generator=g, dtype=torch.int8)
    scales = torch.rand(m, 1, generator=g) * 1e-2
    qact, a_scales = wgmma_s8.pack_activations(codes, scales, 8)
    low = [normal(m, rank) for _ in range(len(ends) + 1)] if rank else []
    fragments = torch.cat([wgmma_s8.pack_lora_act(part) for part in low]) if rank else None
    residual = normal(m, n) if epilogue == "residual" else None
    y = torch.full((m, n // 2 if epilogue == "swiglu" else n), float("nan"), dtype=HALF)
    status = emulated().gemm_lora_up(
        address(qact), address(a_scales), address(packed["qweight"]), address(packed["row_scales"]), address(fragments),
        address(packed.get("proj_up")), address(linear.bias), address(residual), address(y), m, n, k,
        -(-rank // 16) * 16, tile, EPILOGUES[epilogue], list(ends), weights_ready, multiprocessors,
        list(heads),
    )  # fmt: skip
    assert status == 0
    if heads:
        return y
    acc = (codes.double() * scales.double()) @ linear.dequantize_codes(torch.float64).T
    if linear.proj_up is not None:
        rows = [b - a for a, b in zip([0, *ends], [*ends, n], strict=True)]
        parts = linear.proj_up.double().split(rows)
        acc = acc + torch.cat([a.double() @ up.T for a, up in zip(low, parts, strict=True)], dim=1)
    assert linear.bias is not None
    acc = acc + linear.bias.double()
    if residual is not None:
        acc = acc + residual.double()
    if epilogue == "swiglu":
        acc = F.silu(acc[:, 0::2]) * acc[:, 1::2]
    error = relative_error(y, acc)
    assert error < torch.finfo(HALF).eps / 2, f"tile {tile}, {m}x{n}x{k}: error {error:.2e}"
    return y


def test_all_tiles_are_here() -> None:
    assert emulated().tiles == len(TILES)


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_gives_the_same_bits(tile: int) -> None:
    for m, n, k, rank in ((1, 128, 64, 0), (17, 264, 320, 16)):
        assert_same(gemm(m, n, k, rank, tile), gemm(m, n, k, rank, 9), f"tile {tile} at {m}x{n}x{k}")


@pytest.mark.parametrize("tile", TILES)
def test_blocks_take_several_tiles(tile: int) -> None:
    """On one multiprocessor and on many: epilogues, segments of the low-rank branch, weights copied ahead."""
    for options in ({"epilogue": "residual", "ends": (64, 192), "weights_ready": True}, {"epilogue": "swiglu"}):
        few = gemm(70, 264, 448, 20, tile, multiprocessors=1, **options)  # type: ignore[arg-type]
        assert_same(few, gemm(70, 264, 448, 20, tile, **options), f"tile {tile}, {options}")  # type: ignore[arg-type]


# Fewer stages than splits, no multiple of them, many; low-rank steps that fill the ring more than once
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("k", "rank"), [(64, 256), (192, 80), (576, 256), (1088, 16)])
def test_no_split_runs_a_round_ahead_of_the_others(k: int, rank: int, tile: int) -> None:
    few = gemm(100, 128, k, rank, tile, multiprocessors=1)
    assert_same(few, gemm(100, 128, k, rank, 9), f"tile {tile}")


def test_tiles_of_whole_heads_are_chosen() -> None:
    for head_dim in (64, 128):
        for m in (1, 17, 100, 300, 704, 1000, 2048, 5000):
            for n, k in ((4096, 1024), (384, 192), (6144, 4096)):
                assert emulated().tile_features(m, n, k, head_dim) % head_dim == 0


# Tiles whose features are whole heads; query, key and value heads
@pytest.mark.parametrize(
    ("tile", "head_dim", "q_heads", "kv_heads"),
    [
        (1, 64, 3, 1), (6, 64, 3, 1), (8, 64, 4, 2), (11, 64, 5, 1), (13, 64, 4, 2),
        (8, 128, 2, 1), (9, 128, 2, 1), (10, 128, 4, 2), (13, 128, 3, 1), (13, 128, 1, 1),
    ],
)  # fmt: skip
def test_heads_in_the_epilogue_have_the_bits_of_the_op(tile: int, head_dim: int, q_heads: int, kv_heads: int) -> None:
    m, n = 37, (q_heads + 2 * kv_heads) * head_dim
    g = torch.Generator().manual_seed(n)
    cos, sin = torch.randn(2, 50, head_dim // 2, generator=g)
    q_weight, k_weight = torch.rand(2, head_dim, generator=g).half()
    positions = torch.randint(0, 50, (m,), generator=g)
    positions[3], positions[4] = 50, -1  # outside the table
    tensors = [q_weight, k_weight, cos, sin, positions]
    for held in (tensors, [None, *tensors[1:]]):  # with and without a norm of the queries
        heads = [*(address(t) for t in held), 50, q_heads, kv_heads, head_dim]
        found = gemm(m, n, 192, 16, tile, epilogue="qknorm_rope", heads=heads, ends=(64,), multiprocessors=1)
        wanted = gemm(m, n, 192, 16, tile, ends=(64,))
        assert emulated().qknorm_rope(address(wanted), heads, m, n) == 0
        assert_same(found, wanted, f"tile {tile}, {q_heads} and {kv_heads} heads of {head_dim}")
