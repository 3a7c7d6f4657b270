"""A table of recipes on one model: which of them no other beats in both size and quality."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from omniw4.report import html, markdown, plots
from omniw4.report.tables import Table, number


def score(row: dict[str, Any]) -> float | None:
    """What a recipe is judged by: the geometric mean of its perplexity ratios; where there are none, the mean KL."""
    ratios = [text["perplexity"]["ratio"] for text in row["texts"]]
    if all(ratio is not None for ratio in ratios):
        product = 1.0
        for ratio in ratios:
            product *= ratio
        return float(product ** (1 / len(ratios)))
    kls = [text["kl"] for text in row["texts"]]
    return None if any(kl is None for kl in kls) else sum(kls) / len(kls)


def front(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Labels of the recipes that no other beats: none has fewer bits (activations counted) and a better score.

    Recipes with activations of different widths differ in cost on most GPUs, so they are compared within one width.
    """
    kept = []
    for row in rows:
        mine = _cost(row)
        if mine is None:
            continue
        others = [cost for other in rows if other is not row and (cost := _cost(other)) is not None]
        if not any(_beats(other, mine) for other in others):
            kept.append(row["label"])
    return kept


def table(document: dict[str, Any]) -> Table:
    texts = document["datasets"]
    header = ["recipe", "activations", "bits a weight"]
    for name in texts:
        header += [f"ratio, {name}", "KL", "equal first choices"]
    header += ["quantize s", "best of its size"]
    rows = []
    for row in document["recipes"]:
        cells = [row["label"], row["activations"], number(row["effective_bits"], ".2f")]
        for text in row["texts"]:
            cells += [
                number(text["perplexity"]["ratio"], ".3f"),
                number(text["kl"], ".4f"),
                number(text["argmax_agreement"], ".1%"),
            ]
        cells += [number(row["seconds"], ".0f"), "yes" if row["label"] in document["front"] else ""]
        rows.append(cells)
    note = (
        "ratio: perplexity over the original's. Best of its size: no other recipe with activations of the same width "
        "has fewer bits and a better mean."
    )
    return Table(header, rows, note)


def to_markdown(document: dict[str, Any]) -> str:
    lead = f"{document['model']}, {document['windows']} windows of {document['seq_len']} tokens a text."
    return f"# Recipes compared\n\n{markdown._text(lead)}\n\n{markdown._table(table(document))}\n"


def to_html(document: dict[str, Any], *, with_plots: bool = True) -> str:
    """One self-contained page.

    Raises:
        UsageError: plots are wanted and matplotlib is missing.
    """
    lead = f"{document['model']}, {document['windows']} windows of {document['seq_len']} tokens a text"
    parts = [f'<h1>Recipes compared</h1><p class="lead">{escape(lead)}</p>']
    if with_plots:
        drawn = plots.pareto(
            [(r["label"], r["activations"], r["effective_bits"], score(r)) for r in document["recipes"]]
        )
        parts.append(f'<div class="plots">{html._figure("Quality over size; lower left is better", drawn)}</div>')
    parts.append(f"<h2>All recipes</h2>{html._table(table(document))}")
    return html.shell("omniw4 sweep", "\n".join(parts))


def _cost(row: dict[str, Any]) -> tuple[str, float, float] | None:
    found = score(row)
    return (
        None if found is None or row["effective_bits"] is None else (row["activations"], row["effective_bits"], found)
    )


def _beats(other: tuple[str, float, float], mine: tuple[str, float, float]) -> bool:
    same = other[0] == mine[0]
    return same and other[1] <= mine[1] and other[2] <= mine[2] and other[1:] != mine[1:]
