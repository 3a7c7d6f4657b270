"""Coordinate descent: the error never rises, and ends where no single code can be improved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantize_problems import inputs, weights

from omniw4.quantize.refine import coordinate_descent
from omniw4.quantize.scales import Rounded, round_to_nearest

SCALE_TYPES = ("float16", "integer")


def problem(n: int, k: int, scale_type: str, seed: int = 0) -> tuple[torch.Tensor, Rounded, torch.Tensor]:
    """Weights, what they round to, and a damped Hessian."""
    x, w = inputs(400, k, seed=seed), weights(n, k, seed=seed)
    h = x.T @ x / len(x)
    h += 0.01 * h.diagonal().mean() * torch.eye(k)
    return w, round_to_nearest(w, torch.ones(k), "absmax", scale_type), h  # type: ignore[arg-type]


def row_errors(w: torch.Tensor, rounded: Rounded, h: torch.Tensor) -> torch.Tensor:
    e = w.double() - (rounded.codes.double().unflatten(-1, (-1, 64)) * rounded.steps().double()[..., None]).flatten(-2)
    return ((e @ h.double()) * e).sum(-1)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_every_sweep_lowers_the_error_of_every_row_or_leaves_it(scale_type: str) -> None:
    w, start, h = problem(24, 192, scale_type)
    before = first = row_errors(w, start, h)
    for sweeps in range(1, 6):
        found = coordinate_descent(w, start, h, sweeps)
        after = row_errors(w, found, h)
        assert (after <= before * (1 + 1e-5)).all(), f"sweep {sweeps}"
        assert torch.equal(found.scales, start.scales)
        before = after
    assert before.sum() < 0.6 * first.sum()


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_ends_where_no_single_code_can_be_improved(scale_type: str) -> None:
    w, start, h = problem(3, 64, scale_type)
    end = coordinate_descent(w, start, h, 50)
    least = row_errors(w, end, h)
    for row in range(3):
        for column in range(64):
            for code in range(-8, 8):
                other = end.codes.clone()
                other[row, column] = code
                error = row_errors(w, replace(end, codes=other), h)[row]
                assert error >= least[row] * (1 - 1e-4), f"row {row}, column {column}, code {code}"


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_one_sweep_equals_the_definition(scale_type: str) -> None:
    w, start, h = problem(2, 128, scale_type, seed=3)
    expected = start.codes.clone()
    for j in range(128):
        for row in range(2):
            errors = []
            for code in range(-8, 8):
                expected[row, j] = code
                errors.append(float(row_errors(w, replace(start, codes=expected), h)[row]))
            expected[row, j] = min(range(16), key=errors.__getitem__) - 8
    assert torch.equal(coordinate_descent(w, start, h, 1).codes, expected)


@pytest.mark.parametrize("sweeps", [0, 2])
def test_batches_zero_groups_and_no_sweeps(sweeps: int) -> None:
    parts = []
    for seed in range(2):
        w, _, h = problem(5, 128, "integer", seed)
        w[1, :64] = 0
        parts.append((w, round_to_nearest(w, torch.ones(128), "absmax", "integer"), h))
    rows = [start.rows for _, start, _ in parts if start.rows is not None]
    stacked = Rounded(
        torch.stack([p.codes for _, p, _ in parts]), torch.stack([p.scales for _, p, _ in parts]), torch.stack(rows)
    )
    weight, hessian = (torch.stack([part[i] for part in parts]) for i in (0, 2))  # type: ignore[misc]
    together = coordinate_descent(weight, stacked, hessian, sweeps)
    for b, (w, start, h) in enumerate(parts):
        alone = coordinate_descent(w, start, h, sweeps)
        assert (together.codes[b] != alone.codes).float().mean() < 0.02
        assert not together.codes[b, 1, :64].any()
        assert sweeps or torch.equal(alone.codes, start.codes)
