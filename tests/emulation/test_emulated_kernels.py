"""The GEMM of family wgmma_s8 on a CPU, instructions emulated: sums as the references have them, every tile, and no
thread that waits for ever. What only a GPU shows is in tests/kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import build_emulation as build
import pytest
import torch
import torch.nn.functional as F

from omniw4.repack import wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, relative_error

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
HALF = torch.float16
TILES = range(1, 19)
REFERENCE = 11  # 128x128, with which the others are compared
EPILOGUES = {"plain": 0, "residual": 1, "swiglu": 2, "qknorm_rope": 3}


@cache
def emulated() -> ModuleType:
    return build.load()


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


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
    loud_row: int | None = None,
) -> torch.Tensor:
    """One product, held against FP64; with heads in its epilogue, or with a row of large values, it is not."""
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
    if loud_row is not None:
        scales[loud_row] = 3.0
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
    if heads or loud_row is not None:
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
        assert_same(gemm(m, n, k, rank, tile), gemm(m, n, k, rank, REFERENCE), f"tile {tile} at {m}x{n}x{k}")


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
    assert_same(few, gemm(100, 128, k, rank, REFERENCE), f"tile {tile}")


def test_a_gate_of_thousands_changes_nothing_beside_it() -> None:
    """Its exponential is infinite or nothing, and what lies beside it in a warp is as it was."""
    narrow = gemm(60, 128, 192, 16, 1, epilogue="swiglu", loud_row=20)
    assert narrow[20].abs().max() > 100 * narrow[21].abs().max()
    for tile in (7, REFERENCE, 17):
        assert_same(gemm(60, 128, 192, 16, tile, epilogue="swiglu", loud_row=20), narrow, f"tile {tile}")
    quiet = gemm(60, 128, 192, 16, 1, epilogue="swiglu")
    keep = [row for row in range(60) if row != 20]
    assert_same(narrow[keep], quiet[keep], "rows beside the loud one")


def test_tiles_of_whole_heads_are_chosen() -> None:
    for head_dim in (64, 128):
        for m in (1, 17, 100, 300, 704, 1000, 2048, 5000):
            for n, k in ((4096, 1024), (384, 192), (6144, 4096)):
                assert emulated().tile_features(m, n, k, head_dim) % head_dim == 0


# Tiles whose features are whole heads; query, key and value heads
@pytest.mark.parametrize(
    ("tile", "head_dim", "q_heads", "kv_heads"),
    [
        (1, 64, 3, 1), (5, 64, 1, 1), (7, 64, 3, 1), (9, 64, 4, 2), (15, 64, 5, 1), (18, 64, 4, 2),
        (9, 128, 2, 1), (10, 128, 1, 1), (11, 128, 2, 1), (12, 128, 4, 2), (13, 128, 2, 1), (18, 128, 3, 1),
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
