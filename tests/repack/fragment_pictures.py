"""Draws the ownership tables of the simulator the way docs/mma-layouts.md shows them."""

import mma_simulator as sim
import torch


def draw(place: sim.Table, *, columns: str, width: int, register: int, letter: str, transposed: bool = False) -> str:
    """One line a matrix row, one cell for ``width`` neighbouring columns: ``lane.register``.

    Args:
        columns: what the columns are called in the head line.
        width: columns a cell; they must lie in one register of one lane, in rising order.
        register: elements a register.
        transposed: draw the transpose (operand B, whose rows are k).
    """
    rows, cols = (place[1], place[0]) if transposed else place
    row_count, col_count = int(rows.max()) + 1, int(cols.max()) + 1
    owner = torch.full((row_count, col_count, 2), -1)
    for lane in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            owner[rows[lane, i], cols[lane, i]] = torch.tensor([lane, i])
    name = {"k": "n" if transposed else "m", "n": "m"}[columns]
    heads = [f"{start}-{start + width - 1}" if width > 1 else f"{start}" for start in range(0, col_count, width)]
    lines = [f"{name + ' / ' + columns:>7} " + "".join(f"{head:>7}" for head in heads)]
    for row in range(row_count):
        cells = []
        for start in range(0, col_count, width):
            lane, first = owner[row, start].tolist()
            wanted = torch.tensor([[lane, first + step] for step in range(width)])
            assert torch.equal(owner[row, start : start + width], wanted), (row, start)
            assert first // register == (first + width - 1) // register, (row, start)
            cells.append(f"{f'{lane}.{letter}{first // register}':>7}")
        lines.append(f"{row:>7} " + "".join(cells))
    return "\n".join(lines)


PICTURES = {
    "A of m16n8k64 s4": lambda: draw(sim.a_m16n8k64_s4(), columns="k", width=8, register=8, letter="a"),
    "B of m16n8k64 s4": lambda: draw(
        sim.b_m16n8k64_s4(), columns="k", width=8, register=8, letter="b", transposed=True
    ),
    "A of m16n8k32 s8": lambda: draw(sim.a_m16n8k32_s8(), columns="k", width=4, register=4, letter="a"),
    "B of m16n8k32 s8": lambda: draw(
        sim.b_m16n8k32_s8(), columns="k", width=4, register=4, letter="b", transposed=True
    ),
    "A of m16n8k16 f16": lambda: draw(sim.a_m16n8k16_f16(), columns="k", width=2, register=2, letter="a"),
    "D of m16n8": lambda: draw(sim.d_m16n8(), columns="n", width=1, register=1, letter="d"),
}

if __name__ == "__main__":
    for title, picture in PICTURES.items():
        print(title, picture(), sep="\n", end="\n\n")
