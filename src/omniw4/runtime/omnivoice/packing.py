"""Where everything of a batch lies when its rows are packed without padding. Integers only, no device.

Each request gives two rows to the backbone: the conditional one, style + text + reference audio + target, and the
unconditional one, its target alone. Rows follow each other::

    packed row     | request 0 conditional          | request 0 uncond. | request 1 conditional ...
                   | style text reference  target   | target            |
    target t        ........................ ^ ........ ^                   both show the same codes

A *slot* is a target position and codebook, ``t·C + c``, as the audio heads give them. A *cell* is the same thing in
the order in which a request's codes are ranked, codebook first, one request after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

Request = tuple[int, int]  # tokens of the conditional row, of these the target's


@dataclass(frozen=True)
class Size:
    """What static tensors are made for; a batch must fit into it.

    Args:
        tokens: packed rows of hidden states, P.
        targets: target positions over all requests, T.
        requests: sequences are twice as many.
    """

    tokens: int
    targets: int
    requests: int

    def holds(self, other: Size) -> bool:
        return self.tokens >= other.tokens and self.targets >= other.targets and self.requests >= other.requests


@dataclass(frozen=True)
class Packing:
    """Index tensors of one batch, padded to a :class:`Size`; N = C·T cells."""

    positions: torch.Tensor  # [P] int64, within its row; 0 for padding
    cu_seqlens: torch.Tensor  # [2·requests + 1] int32
    target_of_row: torch.Tensor  # [P] int64, which target a packed row shows; 0 where it shows none
    is_target: torch.Tensor  # [P] bool
    conditional: torch.Tensor  # [T] int64, packed row of a target in the conditional row; 0 for padding
    unconditional: torch.Tensor  # [T] int64, the same in the unconditional row
    cell_of_slot: torch.Tensor  # [T, C] int64
    slot_of_cell: torch.Tensor  # [N] int64
    codebook: torch.Tensor  # [N] int64, of a cell
    owner: torch.Tensor  # [N] int64, request of a cell; `requests` for padding
    rank: torch.Tensor  # [N] int64, of a cell within its request

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def needed(requests: Sequence[Request], *, guided: bool = True) -> Size:
    """The exact size of a batch; without guidance there are no unconditional rows."""
    targets = sum(target for _, target in requests)
    return Size(sum(row for row, _ in requests) + guided * targets, targets, len(requests))


def pack(requests: Sequence[Request], codebooks: int, size: Size, *, guided: bool = True) -> Packing:
    """Lay out a batch.

    Args:
        requests: (tokens of the conditional row, of these the target's at its end), in order.
        codebooks: C.
        size: what to pad to; :func:`needed` for no padding.
        guided: False leaves the unconditional rows out; ``unconditional`` then names the conditional ones.
    """
    positions, lengths, shown, rows, twins = [], [], [], [], []
    start = first = 0
    for row, target in requests:
        positions.append(torch.arange(row))
        lengths.append(row)
        shown.append(torch.arange(row) - (row - target) + first)
        shown[-1][: row - target] = -1
        rows.append(torch.arange(start + row - target, start + row))
        start += row
        if guided:
            positions.append(torch.arange(target))
            lengths.append(target)
            shown.append(torch.arange(target) + first)
            twins.append(torch.arange(start, start + target))
            start += target
        first += target
    target_of_row = _padded(torch.cat(shown), size.tokens, -1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Packing(
        _padded(torch.cat(positions), size.tokens, 0),
        _padded(ends, 2 * size.requests + 1, int(ends[-1])).int(),
        target_of_row.clamp(min=0),
        target_of_row >= 0,
        _padded(torch.cat(rows), size.targets, 0),
        _padded(torch.cat(twins or rows), size.targets, 0),
        *_cells([target for _, target in requests], codebooks, size),
    )


def _cells(
    targets: Sequence[int], codebooks: int, size: Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """cell_of_slot, slot_of_cell, codebook, owner, rank."""
    cells = codebooks * size.targets
    slot_of_cell = torch.arange(cells)  # padding: slots past the last target, in any order
    owner = torch.full((cells,), size.requests)
    rank = torch.zeros(cells, dtype=torch.int64)
    first = 0
    for request, target in enumerate(targets):
        part = slice(first * codebooks, (first + target) * codebooks)
        positions = torch.arange(first, first + target)
        slot_of_cell[part] = (positions[None, :] * codebooks + torch.arange(codebooks)[:, None]).reshape(-1)
        owner[part] = request
        rank[part] = torch.arange(target * codebooks)
        first += target
    cell_of_slot = torch.empty_like(slot_of_cell)
    cell_of_slot[slot_of_cell] = torch.arange(cells)
    return cell_of_slot.view(size.targets, codebooks), slot_of_cell, slot_of_cell % codebooks, owner, rank


def unmasking_schedule(cells: int, steps: int, shift: float) -> list[int]:
    """How many of a request's cells each step unmasks; they add up to ``cells``.

    Step i ends at time ``s·t / (1 + (s - 1)·t)`` of t = (i+1)/steps; a small shift s keeps the first steps short.
    """
    even = torch.linspace(0.0, 1.0, steps + 1)
    times = (shift * even / (1 + (shift - 1) * even)).tolist()
    left, schedule = cells, []
    for step in range(steps):
        wanted = left if step == steps - 1 else math.ceil(cells * (times[step + 1] - times[step]))
        schedule.append(min(wanted, left))
        left -= schedule[-1]
    return schedule


def _padded(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
    """``[n]`` to ``[size]``."""
    return torch.cat([values, values.new_full((size - len(values),), fill)])
