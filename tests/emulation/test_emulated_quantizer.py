"""The quantizer of family wgmma_s8 on a CPU, instructions emulated: codes and scales bit for bit as the reference has
them, every way it is cut alike, clusters that end. What only a GPU shows is in tests/kernels."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import build_emulation as build
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from omniw4 import int4, ops
from omniw4.ops.layouts import activation_shapes, lora_act_shape
from omniw4.repack import wgmma_s8
from problems import assert_same, relative_error

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
DTYPES = (torch.float16, torch.bfloat16)
GRIDS = ((4, "integer"), (8, "integer"), (4, "float16"))
EPS = 1e-6
ONE, TWO, FOUR, MANY = 64, 128, 192, 256  # cuts, to which the groups of a block are added
ROWS_ONE, ROWS_TWO, ROWS_FOUR = 320, 384, 448  # cuts of whole rows

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    clip: float = 0.95,
    cut: int = 0,
    weights_ready: bool = False,
    multiprocessors: int = 132,
) -> Found:
    """qact, a_scales and lora_act as the kernel leaves them, over memory full of other things."""
    m, k = x.shape
    packed = None if down is None else wgmma_s8.pack_proj_down(F.pad(down, (0, -down.shape[1] % 16)))
    rank = 0 if packed is None else packed.shape[1] * 16
    shapes = activation_shapes(wgmma_s8.LAYOUT, m, k, bits, x.dtype, scale_type)
    qact, a_scales = torch.full(shapes.qact, 99, dtype=torch.int8), torch.full(shapes.a_scales, float("nan"))
    lora_act = torch.full(lora_act_shape(wgmma_s8.LAYOUT, m, rank, x.dtype)[0], float("nan"), dtype=x.dtype)
    status = emulated().quantize(
        address(x), address(inv_rms), address(norm), address(inv_smooth), address(packed), address(qact),
        address(a_scales), address(lora_act), m, k, rank, bits, clip, rotate,
        scale_type == "integer" and bits == 4, EPS, cut, weights_ready, x.dtype == torch.bfloat16, multiprocessors,
    )  # fmt: skip
    assert status == 0
    return qact, a_scales, lora_act


def wanted_codes(
    x: torch.Tensor,
    bits: int = 4,
    scale_type: str = "integer",
    inv_smooth: torch.Tensor | None = None,
    *norm: torch.Tensor | None,
    rotate: bool = True,
    clip: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    rotation = "hadamard64" if rotate else "none"
    options = (x, None, inv_smooth, *(norm or (None, None)), rotation, bits, clip, scale_type)
    codes, scales, _, outer = ops.quantize_lora_down_ref(*options)  # type: ignore[arg-type]
    if bits == 8:
        return wgmma_s8.pack_activations(codes, scales, 8)
    codes = int4.unpack_nibbles(codes)
    if scale_type == "float16":
        return wgmma_s8.pack_activations(codes, scales, 4)
    return wgmma_s8.pack_activations(int4.widen(codes, scales), outer[:, None], 8)


def inputs(m: int, k: int, rank: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(m + k + rank)
    x = torch.randn(m, k, generator=g)
    x[:, k // 3] *= 20
    if m > 2:
        x[1], x[2, :64] = 0, 0
    return x.to(dtype), (torch.randn(k, rank, generator=g) * k**-0.5).to(dtype) if rank else None


def weights(k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return (torch.rand(k, generator=g) + 0.5).to(dtype), (torch.rand(k, generator=g) + 0.5).reciprocal()


def inv_rms_in_order(x: torch.Tensor) -> torch.Tensor:
    """What the op inv_rms computes on a GPU: squares within a quarter of a group, a group, four chains of groups."""
    m, k = x.shape
    v = x.double().view(m, k // 64, 2, 4, 8)
    squares = torch.zeros(m, k // 64, 4, dtype=torch.float64)
    for h in range(2):
        for j in range(8):
            squares = (squares + v[:, :, h, :, j] ** 2).float().double()

    def quad(s: torch.Tensor) -> torch.Tensor:
        s = s.float()
        return (s[..., 0] + s[..., 1]) + (s[..., 2] + s[..., 3])

    chains = torch.zeros(m, 4)
    of_group = F.pad(quad(squares), (0, -(k // 64) % 4)).view(m, -1, 4)
    for i in range(of_group.shape[1]):
        chains = chains + of_group[:, i]
    mean = quad(chains).numpy() / np.float32(k)
    return torch.from_numpy(np.float32(1) / np.sqrt(mean + np.float32(EPS)))


def low_rank(found: Found, m: int, rank: int) -> torch.Tensor:
    return wgmma_s8.unpack_lora_act(found[2], -(-m // 16) * 16, -(-rank // 16) * 16)


# Rows and columns by which every cut is chosen: few rows, some, many; short rows, long ones; clusters of 1 to 16 blocks
SHAPES = [
    (1, 64, 0), (5, 192, 16), (17, 1024, 16), (20, 704, 40), (130, 320, 33), (1060, 192, 16), (3, 8256, 16),
    (3, 12288, 20), (2, 20480, 0), (50, 128, 256),
]  # fmt: skip


@pytest.mark.parametrize(("m", "k", "rank"), SHAPES)
def test_what_the_reference_does(m: int, k: int, rank: int) -> None:
    x, down = inputs(m, k, rank)
    found = quantize(x, down)
    codes, scales = wanted_codes(x)
    assert_same(found[0], codes, "qact")
    assert_same(found[1], scales, "a_scales")
    if down is None:
        return
    padded = low_rank(found, m, rank)
    assert not padded[m:].any()
    assert not padded[:, rank:].any()
    rotated = ops.transform(x, None, None, None, "hadamard64")
    exact = rotated.double() @ down.double()
    assert relative_error(padded[:m, :rank], exact) <= 2 * relative_error(rotated.half() @ down, exact)
    some = slice(max(0, m - 5), m)
    alone = low_rank(quantize(x[some].contiguous(), down), m - some.start, rank)
    assert_same(alone[: m - some.start], padded[some], "the last rows alone")


@pytest.mark.parametrize(("k", "rank", "cut", "first", "last"), [
    (2048, 16, TWO + 16, 49, 64), (1024, 48, ROWS_ONE, 17, 66), (3072, 16, ROWS_TWO, 50, 66),
    (2048, 16, ROWS_FOUR, 100, 132), (4096, 16, ROWS_FOUR, 50, 66),
])  # fmt: skip
def test_rows_that_fill_the_multiprocessors_once(k: int, rank: int, cut: int, first: int, last: int) -> None:
    """They go in pairs of blocks, or in blocks of whole rows, with these ranks; the bits are the same."""
    chosen = {tiles for tiles in range(1, 300) if emulated().choose_cut(tiles, rank, k // 64, 132) == cut}
    assert chosen == set(range(first, last + 1))
    other_rank = 16 if k == 1024 else 32
    assert all(emulated().choose_cut(tiles, other_rank, k // 64, 132) != cut for tiles in chosen)
    x, down = inputs(32, k, rank)
    multiprocessors = next(n for n in range(1, 9) if emulated().choose_cut(2, rank, k // 64, n) == cut)
    for one, other in zip(quantize(x, down, multiprocessors=multiprocessors), quantize(x, down), strict=True):
        assert_same(one, other, f"k {k}")


CUTS = [
    ONE + 1, ONE + 3, ONE + 4, ONE + 8, TWO + 2, TWO + 6, TWO + 16, FOUR + 4, FOUR + 12, FOUR + 32, MANY + 4, MANY + 8,
    ROWS_ONE, ROWS_TWO, ROWS_FOUR,
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_same_bits(cut: int) -> None:
    """Norm and smoothing inside; in one case two passes over the rank; with one multiprocessor several row tiles to a
    cluster."""
    m, k, rank = (
        67 if cut > MANY else 5,
        64 * max(11, cut % 64 + 1),
        72 if cut in (MANY + 8, ROWS_ONE, ROWS_FOUR) else 16,
    )  # two blocks at least
    x, down = inputs(m, k, rank)
    norm, inv_smooth = weights(k, x.dtype)
    options = {"norm": norm, "inv_smooth": inv_smooth}
    found = quantize(x, down, cut=cut, weights_ready=cut % 2 == 0, multiprocessors=1, **options)  # type: ignore[arg-type]
    other = quantize(x[-3:].contiguous(), down, **options)  # type: ignore[arg-type]
    assert_same(low_rank(found, m, rank)[m - 3 : m], low_rank(other, 3, rank)[:3], "lora_act of the last rows")
    codes, scales = wanted_codes(x, 4, "integer", inv_smooth, inv_rms_in_order(x), norm)
    assert_same(found[0], codes, "qact")
    assert_same(found[1], scales, "a_scales")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "scale_type"), GRIDS)
def test_every_grid_with_norm_and_smoothing(bits: int, scale_type: str, dtype: torch.dtype) -> None:
    for m, k, cut in (
        (19, 320, ONE + 2),
        (5, 576, TWO + 4),
        (37, 704, MANY + 6),
        (21, 960, ROWS_ONE),
        (8, 1984, ROWS_FOUR),
    ):
        x, down = inputs(m, k, 16, dtype)
        norm, inv_smooth = weights(k, dtype)
        rms = inv_rms_in_order(x)
        options = {"bits": bits, "scale_type": scale_type, "norm": norm, "inv_smooth": inv_smooth, "cut": cut}
        found = quantize(x, down, inv_rms=rms, multiprocessors=1, **options)  # type: ignore[arg-type]
        codes, scales = wanted_codes(x, bits, scale_type, inv_smooth, rms, norm)
        assert_same(found[0], codes, f"qact at {m}x{k}")
        assert_same(found[1], scales, f"a_scales at {m}x{k}")
        inside = quantize(x, down, **options)  # type: ignore[arg-type]
        for one, other in zip(inside, found, strict=True):
            assert_same(one, other, f"RMS worked out inside, {m}x{k}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("bits", "scale_type"), GRIDS)
def test_values_at_the_edges(bits: int, scale_type: str, rotate: bool, dtype: torch.dtype) -> None:
    """Zeros, ties, the smallest and the largest numbers, NaN and inf, each alone in its row."""
    info = torch.finfo(dtype)
    x, down = inputs(32, 448, 16, dtype)
    x[0] = 0
    x[1, 0], x[2, 70], x[3, 191] = float("nan"), float("inf"), float("-inf")
    x[4], x[5], x[6] = info.max, info.smallest_normal, info.smallest_normal / 8
    x[7, :64], x[8] = torch.arange(64) / 2 - 16, 1e-6
    x[9, ::2], x[9, 1::2] = 3.5, -3.5
    for i in range(8):  # around where the rotated row, or its sum before the 1/8, leaves FP32
        x[10 + i] = 0
        x[10 + i, i::16] = info.max / 2 ** (i - 2) if i > 2 else info.max
    x[20, :2], x[21, 64:70] = info.max, -info.max
    for cut, clip in ((TWO + 4, 0.95), (ROWS_TWO, 0.95), (FOUR + 4, 1e-4)):  # with the second no code fits 16 bits
        found = quantize(x, bits=bits, scale_type=scale_type, rotate=rotate, clip=clip, cut=cut)
        codes, scales = wanted_codes(x, bits, scale_type, rotate=rotate, clip=clip)
        assert_same(found[0], codes, f"qact, clip {clip}")
        assert_same(found[1], scales, f"a_scales, clip {clip}")
    if bits == 8 or rotate:
        return
    clean = quantize(x, down, bits=bits, scale_type=scale_type, rotate=rotate)
    for row in (1, 2, 3):
        x[row] = 1
    again = quantize(x, down, bits=bits, scale_type=scale_type, rotate=rotate)
    keep = [row for row in range(32) if row not in (1, 2, 3)]
    one, other = (low_rank(found, 32, 16)[keep] for found in (clean, again))
    assert_same(one, other, "rows beside the broken ones")


@pytest.mark.parametrize(("bits", "scale_type"), GRIDS)
def test_codes_of_many_numbers(bits: int, scale_type: str) -> None:
    """Magnitudes apart by powers of two between groups and rows, quarters of a step among them: ties."""
    g = torch.Generator().manual_seed(bits)
    for clip in (1.0, 0.8):
        x = torch.randn(32, 64, 64, generator=g) * 2.0 ** torch.randint(-12, 4, (32, 64, 1), generator=g)
        x = x.reshape(32, 4096)
        x[16:] = torch.randint(-28, 29, (16, 4096), generator=g) / 4
        x[24:, ::64] = 7
        x = x.half()
        found = quantize(x, bits=bits, scale_type=scale_type, rotate=False, clip=clip)
        codes, scales = wanted_codes(x, bits, scale_type, rotate=False, clip=clip)
        assert_same(found[0], codes, f"qact, clip {clip}")
        assert_same(found[1], scales, f"a_scales, clip {clip}")


def test_refused_cuts() -> None:
    x, _ = inputs(3, 2048, 0)
    for cut in (ONE + 1, TWO + 3, FOUR + 36, 8 * 64, ONE + 16, FOUR + 32, ROWS_ONE, ROWS_TWO + 8):
        with pytest.raises(AssertionError):
            quantize(x, cut=cut)
