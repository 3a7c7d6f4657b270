"""The seed's loop over a stack of linears: quantizer and low-rank branch in turn, the best iterate kept.

``Q = GPTQ(W - L)``, ``L = SVD_r(W - Q)``, again, until the error no longer falls. With sweeps the codes of the best
round are fitted to its branch once more: ``Q = descent(W - L, Q)``; no round begins with what they find, so for the
others they would be for nothing. L is rounded to its stored 16-bit type before Q is fitted to it and before the error
is taken, so what is measured is what is stored.

A leading axis B holds linears of equal shape that read different inputs (the same linear of B blocks). They share
launches, never numbers: each has its own Hessian, branch, errors and best iterate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from omniw4.config import Recipe
from omniw4.quantize.lowrank import LowRank, Whitening, energy_share, svd_lowrank
from omniw4.quantize.measure import output_energies, relative_errors
from omniw4.quantize.scales import Rounded


@dataclass(frozen=True)
class Quantizer:
    """How weights ``[B, N, K]`` become codes, and codes better ones of the same scales, where there is a way."""

    round: Callable[[torch.Tensor], Rounded]
    improve: Callable[[torch.Tensor, Rounded], Rounded] | None = None


@dataclass(frozen=True)
class Stack:
    """Linears of one shape, rank and stored type, one from each of B inputs."""

    target: torch.Tensor  # [B, N, K] float32, what is to be approximated
    rank: int
    dtype: torch.dtype  # of the low-rank factors
    whitening: Whitening | None = None  # of the B inputs

    def fit(self, residual: torch.Tensor) -> LowRank | None:
        """The low-rank branch ``[B, ...]`` that holds most of a residual ``[B, N, K]``; None at rank 0."""
        return svd_lowrank(residual, self.rank, self.dtype, self.whitening) if self.rank else None


@dataclass
class Iterate:
    """One linear after one round."""

    rounded: Rounded  # [N, K]
    low: LowRank | None
    error: float
    rank_energy: float


@dataclass
class Outcome:
    """The best iterate of one linear, improved, and the error after each round it took part in, before that."""

    best: Iterate
    errors: list[float]


def alternate(
    stacks: Sequence[Stack], objective: torch.Tensor | None, quantize: Quantizer, recipe: Recipe
) -> list[list[Outcome]]:
    """Run the recipe's rounds.

    Args:
        stacks: the linears of one input (q, k, v), each with its B twins; they go through the quantizer joined
            along N.
        objective: ``[B, K, K]`` float32, or None: the error is that of the weights.

    Returns:
        For each stack its B outcomes.
    """
    lows: list[LowRank | None] = [None] * len(stacks)
    if recipe.lowrank.init == "svd_weight":
        lows = [stack.fit(stack.target) for stack in stacks]
    found: list[list[Outcome | None]] = [[None] * len(stack.target) for stack in stacks]
    active = [[True] * len(stack.target) for stack in stacks]
    signals = [output_energies(stack.target, objective) for stack in stacks]
    for _ in range(recipe.lowrank.rounds):
        joined = [i for i, flags in enumerate(active) if any(flags)]
        if not joined:
            break
        counts = [stacks[i].target.shape[-2] for i in joined]
        rounded = quantize.round(torch.cat([without(stacks[i].target, lows[i]) for i in joined], dim=-2))
        parts = zip(joined, rounded.split(counts), strict=True)
        fitted = [stacks[i].fit(stacks[i].target - part.dequantize()) for i, part in parts]
        for i, part, low in zip(joined, rounded.split(counts), fitted, strict=True):
            iterates = measure(stacks[i], part, low, objective, signals[i])
            better = [_record(found[i], b, it) if active[i][b] else False for b, it in enumerate(iterates)]
            lows[i] = _choose(better, low, lows[i])
            active[i] = [fell and low is not None for fell in better]  # without a branch every round is the same
    outcomes = [[outcome for outcome in row if outcome is not None] for row in found]
    if quantize.improve is not None:
        _improve(stacks, outcomes, objective, quantize.improve, signals)
    return outcomes


def _improve(
    stacks: Sequence[Stack],
    outcomes: Sequence[Sequence[Outcome]],
    objective: torch.Tensor | None,
    improve: Callable[[torch.Tensor, Rounded], Rounded],
    signals: Sequence[Sequence[float]],
) -> None:
    """Better codes for the best iterates of all linears, in place where they are."""
    lows = [LowRank.stack([outcome.best.low for outcome in row]) for row in outcomes]
    rests = [without(stack.target, low) for stack, low in zip(stacks, lows, strict=True)]
    start = Rounded.join([Rounded.stack([outcome.best.rounded for outcome in row]) for row in outcomes])
    better = improve(torch.cat(rests, dim=-2), start)
    parts = better.split([stack.target.shape[-2] for stack in stacks])
    for stack, row, part, low, signal in zip(stacks, outcomes, parts, lows, signals, strict=True):
        for outcome, iterate in zip(row, measure(stack, part, low, objective, signal), strict=True):
            if iterate.error < outcome.best.error:
                outcome.best = iterate


def complete(stack: Stack, rounded: Rounded, objective: torch.Tensor | None) -> tuple[LowRank | None, list[Iterate]]:
    """Codes, the low-rank branch that fits them best, and the error of both together, for each of B."""
    low = stack.fit(stack.target - rounded.dequantize())
    return low, measure(stack, rounded, low, objective, output_energies(stack.target, objective))


def measure(
    stack: Stack, rounded: Rounded, low: LowRank | None, objective: torch.Tensor | None, signals: Sequence[float]
) -> list[Iterate]:
    """Codes and low-rank branch with the error of both together, for each of B; ``signals``: the targets' energies."""
    residual = stack.target - rounded.dequantize()
    rest = without(residual, low)
    held = energy_share(residual, rest).tolist()
    errors = relative_errors(rest, stack.target, objective, signals)
    return [Iterate(rounded[b], None if low is None else low[b], error, held[b]) for b, error in enumerate(errors)]


def without(weight: torch.Tensor, low: LowRank | None) -> torch.Tensor:
    return weight if low is None else weight - low.product()


def _record(outcomes: list[Outcome | None], index: int, iterate: Iterate) -> bool:
    """Note one round of one linear; whether it is the best so far."""
    known = outcomes[index]
    if known is None:
        outcomes[index] = Outcome(iterate, [iterate.error])
        return True
    known.errors.append(iterate.error)
    if iterate.error < known.best.error:
        known.best = iterate
        return True
    return False


def _choose(better: list[bool], new: LowRank | None, old: LowRank | None) -> LowRank | None:
    """The new branch where it is better, else the one before."""
    if new is None or old is None or all(better):
        return new
    mask = torch.tensor(better, device=new.up.device)[:, None, None]
    return LowRank(torch.where(mask, new.up, old.up), torch.where(mask, new.down, old.down))
