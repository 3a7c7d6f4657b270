"""Second moments against their definition, row by row."""

from __future__ import annotations

import pytest
import torch
from calibration_models import assert_same

from omniw4.calibrate.accumulate import Accumulator, add_gram, mirror_
from omniw4.tensors import LinearStats


def rows(t: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(t, k, generator=torch.Generator().manual_seed(seed))


def definition(x: torch.Tensor, excluded: int = 0) -> LinearStats:
    x = x.double()
    mean_square = x.square().mean(1, keepdim=True)
    normalized = torch.where(mean_square > 0, x / mean_square.sqrt(), 0.0)
    rms = x.square().mean(0).sqrt()
    return LinearStats(x.T @ x / len(x), normalized.T @ normalized / len(x), x.abs().amax(0), rms, len(x), excluded)


@pytest.mark.parametrize("k", [1, 63, 64, 127, 128, 129, 257, 576])
def test_panels_give_the_gram_matrix(k: int) -> None:
    x = rows(37, k)
    total = torch.zeros(k, k)
    add_gram(total, x.T.contiguous())
    wanted = x.double().T @ x.double()
    assert (mirror_(total).double() - wanted).norm() <= 1e-6 * wanted.norm()
    assert torch.equal(mirror_(total), mirror_(total).T)


def test_sums_over_batches_equal_one_batch() -> None:
    x = rows(100, 70)
    accumulator = Accumulator(70)
    for part in x.split([1, 40, 59]):
        accumulator.add(part)
    assert_same(accumulator.finish(), definition(x), "three batches")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_left_out_and_counted(bad: float) -> None:
    x = rows(50, 64)
    poisoned = x.clone()
    poisoned[3, 0] = poisoned[17, 63] = bad
    accumulator = Accumulator(64)
    accumulator.add(poisoned)
    good = [i for i in range(50) if i not in (3, 17)]
    assert_same(accumulator.finish(), definition(x[good], excluded=2), str(bad))


def test_a_batch_without_a_finite_row_changes_nothing() -> None:
    accumulator = Accumulator(64)
    accumulator.add(torch.full((5, 64), float("nan")))
    stats = accumulator.finish()
    assert (stats.tokens, stats.excluded) == (0, 5)
    assert torch.equal(stats.hessian, torch.zeros(64, 64))


def test_a_zero_row_counts_and_adds_nothing() -> None:
    x = rows(20, 64)
    x[4] = 0
    accumulator = Accumulator(64)
    accumulator.add(x)
    assert_same(accumulator.finish(), definition(x), "zero row")


def test_sums_are_fp32_for_fp16_rows() -> None:
    x = torch.full((4096, 64), 200.0, dtype=torch.float16)  # a sum of squares of 1.6e8, past the largest FP16
    accumulator = Accumulator(64)
    accumulator.add(x)
    assert torch.equal(accumulator.finish().hessian, torch.full((64, 64), 40000.0))
