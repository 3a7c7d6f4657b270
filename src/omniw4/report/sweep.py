"""Recipes compared on one model: means and spreads over calibrations, differences, and which no other beats.

A *run* is one recipe, quantized from one calibration (or from none, where it needs none) and judged. Runs of one label
make a row: the means of their figures, and their sample standard deviations over the calibrations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

BEYOND = 2  # standard deviations that a difference must exceed


def score(run: dict[str, Any]) -> float | None:
    """What a run is judged by: the geometric mean of its perplexity ratios; where there are none, the mean KL."""
    ratios = [text["perplexity"]["ratio"] for text in run["texts"]]
    if all(ratio is not None for ratio in ratios):
        product = 1.0
        for ratio in ratios:
            product *= ratio
        return float(product ** (1 / len(ratios)))
    kls = [text["kl"] for text in run["texts"]]
    return None if any(kl is None for kl in kls) else sum(kls) / len(kls)


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a label, in the order of their first runs.

    Each holds the means over its ``runs``, ``score``, and ``std``: standard deviations of ``score`` and ``texts``,
    None for a single run.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["label"], []).append(run)
    found = []
    for label, group in groups.items():
        figures = [
            {"effective_bits": run["effective_bits"], "seconds": run["seconds"], "backbone_ms": run.get("backbone_ms"),
             "texts": run["texts"], "score": score(run)}
            for run in group
        ]  # fmt: skip
        spread = _each(figures, statistics.stdev) if len(group) > 1 else None
        found.append(
            {
                "label": label,
                "activations": group[0]["activations"],
                **_each(figures, statistics.fmean),
                "std": spread and {name: spread[name] for name in ("score", "texts")},
                "runs": group,
            }
        )
    return found


def compare(found: Sequence[dict[str, Any]], baseline: str) -> None:
    """Give every row its ``difference`` in score to the baseline, and whether that is ``beyond`` twice the spread.

    The spread is the larger of the two standard deviations. Both are None where there is nothing to compare: the
    baseline itself, no score, or for ``beyond`` no standard deviation.
    """
    base = next(row for row in found if row["label"] == baseline)
    for row in found:
        row["difference"] = row["beyond"] = None
        if row is base or row["score"] is None or base["score"] is None:
            continue
        row["difference"] = row["score"] - base["score"]
        if spreads := [other["std"]["score"] for other in (row, base) if other["std"]]:
            row["beyond"] = abs(row["difference"]) > BEYOND * max(spreads)


def front(found: Sequence[dict[str, Any]]) -> list[str]:
    """Labels of the recipes that no other beats: none has fewer bits (activations counted) and a better score.

    Recipes with activations of different widths differ in cost on most GPUs, so they are compared within one width.
    """
    kept = []
    for row in found:
        mine = _cost(row)
        if mine is None:
            continue
        others = [cost for other in found if other is not row and (cost := _cost(other)) is not None]
        if not any(_beats(other, mine) for other in others):
            kept.append(row["label"])
    return kept


def _each(values: Sequence[Any], reduce: Callable[[Sequence[float]], float]) -> Any:
    """Documents of one shape to one of that shape, of each number ``reduce`` of all; what is no number becomes None."""
    first = values[0]
    if isinstance(first, dict):
        named = {key: _each([value.get(key) for value in values], reduce) for key in first}
        return {key: value for key, value in named.items() if not isinstance(first[key], str)}
    if isinstance(first, list):
        return [_each(column, reduce) for column in zip(*values, strict=True)]
    return reduce(values) if all(isinstance(value, int | float) for value in values) else None


def _cost(row: dict[str, Any]) -> tuple[str, float, float] | None:
    if row["score"] is None or row["effective_bits"] is None:
        return None
    return row["activations"], row["effective_bits"], row["score"]


def _beats(other: tuple[str, float, float], mine: tuple[str, float, float]) -> bool:
    same = other[0] == mine[0]
    return same and other[1] <= mine[1] and other[2] <= mine[2] and other[1:] != mine[1:]
