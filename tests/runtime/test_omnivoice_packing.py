"""Index arithmetic of packed decoding, against loops that say the same in the package's layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniw4.runtime.omnivoice.decoder import BUCKETS, _sizes
from omniw4.runtime.omnivoice.packing import Size, needed, pack, unmasking_schedule

CODEBOOKS = 3
requests_of_a_batch = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=4).map(
    lambda pairs: [(text + target, target) for text, target in pairs]
)


@given(requests_of_a_batch, st.integers(0, 5), st.booleans())
def test_every_target_is_found_again(requests: list[tuple[int, int]], padding: int, guided: bool) -> None:
    exact = needed(requests, guided=guided)
    size = Size(exact.tokens + padding, exact.targets + padding, exact.requests + padding)
    packing = pack(requests, CODEBOOKS, size, guided=guided)
    row = target = 0
    ends = [0]
    for number, (length, wanted) in enumerate(requests):
        for copy, rows in enumerate([length, wanted] if guided else [length]):
            assert packing.positions[row : row + rows].tolist() == list(range(rows))
            for t in range(wanted):
                place = row + rows - wanted + t
                assert packing.is_target[place]
                assert packing.target_of_row[place] == target + t
                names = packing.unconditional if copy else packing.conditional
                assert names[target + t] == place
            assert not packing.is_target[row : row + rows - wanted].any()
            row += rows
            ends.append(row)
        cells = packing.slot_of_cell[target * CODEBOOKS : (target + wanted) * CODEBOOKS].tolist()
        assert cells == [(target + t) * CODEBOOKS + c for c in range(CODEBOOKS) for t in range(wanted)]
        owned = packing.owner == number
        assert packing.rank[owned].tolist() == list(range(wanted * CODEBOOKS))
        target += wanted
    assert packing.cu_seqlens.tolist() == ends + [row] * (2 * size.requests + 1 - len(ends))
    assert not packing.is_target[row:].any()
    assert (packing.owner[target * CODEBOOKS :] == size.requests).all()
    assert packing.slot_of_cell.sort().values.tolist() == list(range(CODEBOOKS * size.targets))
    assert torch.equal(packing.cell_of_slot.view(-1)[packing.slot_of_cell], torch.arange(CODEBOOKS * size.targets))
    if not guided:
        assert torch.equal(packing.unconditional, packing.conditional)


@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0])
@given(cells=st.integers(1, 400), steps=st.integers(1, 40))
def test_a_schedule_unmasks_everything_once(shift: float, cells: int, steps: int) -> None:
    schedule = unmasking_schedule(cells, steps, shift)
    assert len(schedule) == steps
    assert min(schedule) >= 0
    assert sum(schedule) == cells


def test_a_small_shift_begins_slowly() -> None:
    assert unmasking_schedule(320, 8, 0.1)[0] < unmasking_schedule(320, 8, 1.0)[0] == 40


def test_captured_sizes_hold_what_the_package_may_ask_for() -> None:
    """A single request of 30 s with 20 s of reference and a long text, and 16 of 6 s."""
    sizes = _sizes(BUCKETS, 16)
    assert [s.tokens for s in sizes] == sorted(s.tokens for s in sizes)
    assert len(set(sizes)) == len(sizes) < 50
    for asked in (Size(2040, 750, 1), Size(16 * 380, 16 * 150, 16), Size(70, 20, 1), Size(256, 128, 2)):
        found = next(size for size in sizes if size.holds(asked))
        assert found.tokens - asked.tokens < max(64, 0.15 * asked.tokens)
    assert [s.requests for s in _sizes((256, 4096), 1)] == [1, 1]
