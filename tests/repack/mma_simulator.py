"""Tensor-core instructions in torch, from the ownership tables of the PTX ISA manual.

Each function takes the registers of every lane, finds out from the tables which matrix elements they are, multiplies,
and gives every lane the accumulators the tables say it owns. The tables are transcribed from the manual's formulas
("Matrix Fragments for ..."), element by element, and share nothing with the code under test.
"""

from collections.abc import Callable
from functools import cache

import torch

Table = tuple[torch.Tensor, torch.Tensor]  # rows and columns, each [lanes, elements]


def table(lanes: int, elements: int, place: Callable[[int, int], tuple[int, int]]) -> Table:
    """Row and column of element i of a lane's fragment, for all lanes."""
    places = torch.tensor([[place(lane, i) for i in range(elements)] for lane in range(lanes)])
    return places[..., 0], places[..., 1]


@cache
def a_m16n8k64_s4() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = group if 0 <= i < 8 or 16 <= i < 24 else group + 8
        column = thread * 8 + (i & 0x7) if i < 16 else thread * 8 + (i & 0x7) + 32
        return row, column

    return table(32, 32, place)


@cache
def b_m16n8k64_s4() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = thread * 8 + (i & 0x7) if i < 8 else thread * 8 + (i & 0x7) + 32
        return row, group

    return table(32, 16, place)


@cache
def a_m16n8k32_s8() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
        column = thread * 4 + (i & 0x3) if i < 8 else thread * 4 + (i & 0x3) + 16
        return row, column

    return table(32, 16, place)


@cache
def b_m16n8k32_s8() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = thread * 4 + (i & 0x3) if i < 4 else thread * 4 + (i & 0x3) + 16
        return row, group

    return table(32, 8, place)


@cache
def a_m16n8k16_f16() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        column = thread * 2 + (i & 0x1) if i < 4 else thread * 2 + (i & 0x1) + 8
        return row, column

    return table(32, 8, place)


@cache
def b_m16n8k16_f16() -> Table:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = thread * 2 + (i & 0x1) if i < 2 else thread * 2 + (i & 0x1) + 8
        return row, group

    return table(32, 4, place)


@cache
def d_m16n8() -> Table:
    """Accumulators c0..c3 of every mma.m16n8 with 32-bit accumulators."""

    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = group if i < 2 else group + 8
        return row, thread * 2 + (i & 0x1)

    return table(32, 4, place)


@cache
def a_wgmma_m64k32() -> Table:
    """Figure "WGMMA .m64nNk32 register fragment layout for matrix A": warp w of the warpgroup holds rows 16w to
    16w + 15; in each, a0..a3 are columns 4t..4t+3 of row g, a4..a7 those of row g + 8, a8..a15 the same 16 to the
    right."""

    def place(thread: int, i: int) -> tuple[int, int]:
        warp, group, t = thread // 32, (thread % 32) >> 2, thread % 4
        return 16 * warp + group + 8 * ((i // 4) % 2), 4 * t + i % 4 + 16 * (i // 8)

    return table(128, 16, place)


@cache
def d_wgmma_m64(n: int) -> Table:
    """Figure "WGMMA .m64nNk32 register fragment layout for accumulator matrix D": d0, d1 are columns 2t, 2t+1 of row
    g, d2, d3 those of row g + 8, and so on every eight columns to the right."""

    def place(thread: int, i: int) -> tuple[int, int]:
        warp, group, t = thread // 32, (thread % 32) >> 2, thread % 4
        return 16 * warp + group + 8 * ((i // 2) % 2), 8 * (i // 4) + 2 * t + i % 2

    return table(128, n // 2, place)


def words(fragment_bytes: torch.Tensor) -> torch.Tensor:
    """``[..., 4n]`` bytes as a lane loads them to ``[..., n]`` 32-bit words, little endian, held in int64."""
    b = fragment_bytes.to(torch.int64).unflatten(-1, (-1, 4))
    return b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24


def elements(registers: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed elements of 32-bit registers, low to high: ``[lanes, n]`` to ``[lanes, n * 32 / bits]``."""
    shifts = torch.arange(0, 32, bits)
    raw = (registers[..., None] >> shifts) & ((1 << bits) - 1)
    signed = raw - ((raw >> (bits - 1)) << bits)
    return signed.flatten(-2)


def gather(values: torch.Tensor, place: Table, shape: tuple[int, int]) -> torch.Tensor:
    """The matrix that all lanes hold together; every element must be held exactly once."""
    rows, columns = place
    index = (rows * shape[1] + columns).flatten()
    assert index.sort().values.equal(torch.arange(shape[0] * shape[1])), "the table is no bijection"
    matrix = torch.empty(shape[0] * shape[1], dtype=values.dtype)
    matrix[index] = values.flatten()
    return matrix.reshape(shape)


def mma_m16n8k64_s4(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a ``[32, 4]``, b ``[32, 2]`` words to d ``[32, 4]``."""
    rows = gather(elements(a, 4), a_m16n8k64_s4(), (16, 64))
    columns = gather(elements(b, 4), b_m16n8k64_s4(), (64, 8))
    return (rows @ columns)[d_m16n8()]


def mma_m16n8k32_s8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a ``[32, 4]``, b ``[32, 2]`` words to d ``[32, 4]``."""
    rows = gather(elements(a, 8), a_m16n8k32_s8(), (16, 32))
    columns = gather(elements(b, 8), b_m16n8k32_s8(), (32, 8))
    return (rows @ columns)[d_m16n8()]


def mma_m16n8k16_f16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a ``[32, 8]``, b ``[32, 4]`` elements (two to a register) to d ``[32, 4]`` float32."""
    rows = gather(a.float(), a_m16n8k16_f16(), (16, 16))
    columns = gather(b.float(), b_m16n8k16_f16(), (16, 8))
    return (rows @ columns)[d_m16n8()]


def wgmma_m16n8k16_f16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A warp's share of m64n8k16: a ``[32, 8]`` elements, b ``[2, 8, 8]``, core matrices without swizzle (eight of k,
    column, k), to d ``[32, 4]``."""
    rows = gather(a.float(), a_m16n8k16_f16(), (16, 16))
    return (rows @ b.float().permute(0, 2, 1).reshape(16, 8))[d_m16n8()]


def wgmma_m64k32_s8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a ``[128, 4]`` words, b ``[32, N]`` from shared memory to d ``[128, N/2]``."""
    rows = gather(elements(a, 8), a_wgmma_m64k32(), (64, 32))
    return (rows @ b)[d_wgmma_m64(b.shape[1])]
