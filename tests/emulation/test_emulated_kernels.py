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
import tune  # scripts/

from omniw4.repack import wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, relative_error

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
HALF = torch.float16
DTYPES = (torch.float16, torch.bfloat16)
TILES = range(1, 22)
CLUSTERS = range(18, 22)  # tiles whose K the blocks of a cluster share out
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
    dtype: torch.dtype = HALF,
) -> torch.Tensor:
    """One product, held against FP64; with heads in its epilogue, or with a row of large values, it is not."""
    g = torch.Generator().manual_seed(m + n + k + rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

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
    y = torch.full((m, n // 2 if epilogue == "swiglu" else n), float("nan"), dtype=dtype)
    status = emulated().gemm_lora_up(
        address(qact), address(a_scales), address(packed["qweight"]), address(packed["row_scales"]), address(fragments),
        address(packed.get("proj_up")), address(linear.bias), address(residual), address(y), m, n, k,
        -(-rank // 16) * 16, tile, EPILOGUES[epilogue], list(ends), weights_ready, multiprocessors,
        list(heads), dtype == torch.bfloat16,
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
    assert error < torch.finfo(dtype).eps / 2, f"tile {tile}, {m}x{n}x{k}: error {error:.2e}"
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


# One stage for all blocks, fewer than blocks, more; a stage that ends in the middle; ranks with and without segments.
# Tokens for the first block of a cluster alone, for some, for all and for a second tile.
@pytest.mark.parametrize("tile", CLUSTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cluster_shares_out_k_and_tokens(dtype: torch.dtype, tile: int) -> None:
    for m, n, k, rank, ends, epilogue, ready in (
        (1, 128, 64, 0, (), "plain", True), (16, 128, 128, 16, (64,), "residual", False),
        (33, 72, 320, 48, (), "swiglu", True), (50, 136, 576, 48, (64,), "residual", True),
        (200, 128, 320, 16, (), "plain", False), (40, 128, 1216, 0, (), "swiglu", False),
    ):  # fmt: skip
        found, wanted = (by(m, n, k, rank, epilogue, ends, ready, dtype, t) for t in (tile, REFERENCE))
        assert_same(found, wanted, f"tile {tile} at {m}x{n}x{k}, rank {rank}, {epilogue}")


@cache
def by(
    m: int, n: int, k: int, rank: int, epilogue: str, ends: tuple[int, ...], ready: bool, dtype: torch.dtype, tile: int
) -> torch.Tensor:
    return gemm(m, n, k, rank, tile, epilogue=epilogue, ends=ends, weights_ready=ready, dtype=dtype)


def test_a_gate_of_thousands_changes_nothing_beside_it() -> None:
    """Its exponential is infinite or nothing, and what lies beside it in a warp is as it was."""
    narrow = gemm(60, 128, 192, 16, 1, epilogue="swiglu", loud_row=20)
    assert narrow[20].abs().max() > 100 * narrow[21].abs().max()
    for tile in (7, REFERENCE, 17, 19, 20):
        assert_same(gemm(60, 128, 192, 16, tile, epilogue="swiglu", loud_row=20), narrow, f"tile {tile}")
    quiet = gemm(60, 128, 192, 16, 1, epilogue="swiglu")
    keep = [row for row in range(60) if row != 20]
    assert_same(narrow[keep], quiet[keep], "rows beside the loud one")


def test_tiles_of_whole_heads_are_chosen() -> None:
    for head_dim in (64, 128):
        for m in (1, 17, 100, 300, 704, 1000, 2048, 5000):
            for n, k in ((4096, 1024), (384, 192), (6144, 4096)):
                tile = emulated().choose_tile(m, n, k, head_dim, 132)
                assert emulated().costs()[tile - 1][0] % head_dim == 0


def test_the_table_is_in_the_order_of_the_numbers() -> None:
    assert [number for *_, number in emulated().costs()] == list(TILES)
    assert [number for *_, cluster, number in emulated().costs() if cluster > 1] == list(CLUSTERS)


@pytest.mark.parametrize("multiprocessors", [4, 78, 132])
def test_what_fits_the_costs_counts_time_as_the_choice_does(multiprocessors: int) -> None:
    cost = tune.Cost(1.5, 0.3, 0.2)
    for number, (*sizes, _) in enumerate(emulated().costs(), start=1):
        tile = tune.Tile(number, *sizes)
        for m, n, k in ((1, 128, 64), (16, 1024, 3072), (100, 4096, 1088), (704, 12288, 4096), (4096, 1024, 2048)):
            wanted = emulated().estimate(number, (cost.wave, cost.stage, cost.stage_alone), m, n, k, multiprocessors)
            assert cost.time(tile, m, n, k, multiprocessors) == pytest.approx(wanted), f"{tile.name} at {m}x{n}x{k}"


def test_clusters_are_chosen_where_few_tiles_have_much_to_do() -> None:
    def cluster(m: int, n: int, k: int, multiprocessors: int = 132) -> int:
        return int(emulated().costs()[emulated().choose_tile(m, n, k, 0, multiprocessors) - 1][4])

    for m, n, k in ((16, 1024, 2048), (16, 1024, 3072), (16, 4096, 12288), (1024, 1024, 2048)):
        assert cluster(m, n, k) > 1, f"{m}x{n}x{k}"
    for m, n, k in ((1, 4096, 128), (4096, 12288, 4096), (4096, 1024, 1024)):
        assert cluster(m, n, k) == 1, f"{m}x{n}x{k}"
    for multiprocessors in (1, 2, 3, 5):  # no cluster that does not fit
        for m in (1, 16, 100, 5000):
            tile = emulated().choose_tile(m, 1024, 3072, 0, multiprocessors)
            _, _, blocks, _, blocks_of_cluster, _ = emulated().costs()[tile - 1]
            assert blocks_of_cluster <= blocks * multiprocessors


# Tiles whose features are whole heads; query, key and value heads
@pytest.mark.parametrize(
    ("tile", "head_dim", "q_heads", "kv_heads"),
    [
        (1, 64, 3, 1), (5, 64, 1, 1), (7, 64, 3, 1), (9, 64, 4, 2), (15, 64, 5, 1),
        (9, 128, 2, 1), (10, 128, 1, 1), (11, 128, 2, 1), (12, 128, 4, 2), (13, 128, 2, 1),
        (18, 64, 3, 1), (19, 64, 1, 1), (20, 64, 4, 2), (21, 64, 3, 1), (20, 128, 2, 1), (21, 128, 2, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_in_the_epilogue_have_the_bits_of_the_op(
    dtype: torch.dtype, tile: int, head_dim: int, q_heads: int, kv_heads: int
) -> None:
    m, n = 37, (q_heads + 2 * kv_heads) * head_dim
    g = torch.Generator().manual_seed(n)
    cos, sin = torch.randn(2, 50, head_dim // 2, generator=g)
    q_weight, k_weight = torch.rand(2, head_dim, generator=g).to(dtype)
    positions = torch.randint(0, 50, (m,), generator=g)
    positions[3], positions[4] = 50, -1  # outside the table
    tensors = [q_weight, k_weight, cos, sin, positions]
    for held in (tensors, [None, *tensors[1:]]):  # with and without a norm of the queries
        heads = [*(address(t) for t in held), 50, q_heads, kv_heads, head_dim]
        options = {"ends": (64,), "dtype": dtype}
        found = gemm(m, n, 192, 16, tile, epilogue="qknorm_rope", heads=heads, multiprocessors=1, **options)  # type: ignore[arg-type]
        wanted = gemm(m, n, 192, 16, tile, **options)  # type: ignore[arg-type]
        assert emulated().qknorm_rope(address(wanted), heads, m, n, dtype == torch.bfloat16) == 0
        assert_same(found, wanted, f"tile {tile}, {q_heads} and {kv_heads} heads of {head_dim}")
