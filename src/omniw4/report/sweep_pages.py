"""A comparison of recipes as a table, as Markdown and as one HTML page with plots."""

from __future__ import annotations

from html import escape
from typing import Any

from omniw4.report import html, markdown, plots
from omniw4.report.tables import NONE, Table, number

# of a text or of prompts: (header, path to the figure, format)
_TEXT = (
    ("ratio, {}", ("perplexity", "ratio"), ".3f"),
    ("KL", ("kl",), ".4f"),
    ("equal first choices", ("argmax_agreement",), ".1%"),
)
_PROMPTS = (
    ("step agreement", ("argmax_agreement",), ".2%"),
    ("final match", ("match",), ".2%"),
    ("KL", ("kl",), ".4f"),
)


def table(document: dict[str, Any]) -> Table:
    """A row a recipe; columns that no row has a figure for are left out."""
    found, baseline = document["recipes"], document["baseline"]
    spread = any(row["std"] for row in found)
    timed = any(row["backbone_ms"] is not None for row in found)
    figures = _PROMPTS if document.get("prompts") else _TEXT
    header = ["recipe", "activations", "bits a weight"]
    header += [head.format(name) for name in document["datasets"] for head, _, _ in figures]
    header += ["ms a forward"] * timed + ["quantize s"] + ["calibrations"] * spread
    header += [f"score − {baseline}"] * (len(found) > 1) + ["beyond the spread"] * spread + ["best of its size"]
    cells = []
    for row in found:
        line = [row["label"], row["activations"], number(row["effective_bits"], ".2f")]
        for index, text in enumerate(row["texts"]):
            std = row["std"]["texts"][index] if row["std"] else None
            line += [_figure(text, std, path, form) for _, path, form in figures]
        line += [number(row["backbone_ms"], ".3f")] * timed + [number(row["seconds"], ".0f")]
        line += [_calibrations(row)] * spread
        line += [number(row["difference"], "+.4f", "")] * (len(found) > 1)
        line += [{True: "yes", False: "no", None: ""}[row["beyond"]]] * spread
        line.append("yes" if row["label"] in document["front"] else "")
        cells.append(line)
    return Table(header, cells, _note(document, spread=spread, timed=timed))


def to_markdown(document: dict[str, Any]) -> str:
    return f"# Recipes compared\n\n{markdown._text(_lead(document))}.\n\n{markdown._table(table(document))}\n"


def to_html(document: dict[str, Any], *, with_plots: bool = True) -> str:
    """One self-contained page.

    Raises:
        UsageError: plots are wanted and matplotlib is missing.
    """
    parts = [f'<h1>Recipes compared</h1><p class="lead">{escape(_lead(document))}</p>']
    if with_plots:
        parts.append(f'<div class="plots">{"".join(_plots(document))}</div>')
    parts.append(f"<h2>All recipes</h2>{html._table(table(document))}")
    return html.shell("omniw4 sweep", "\n".join(parts))


def _lead(document: dict[str, Any]) -> str:
    if prompts := document.get("prompts"):
        return f"{document['model']}, {prompts['count']} prompts decoded in {prompts['num_step']} steps"
    return f"{document['model']}, {document['windows']} windows of {document['seq_len']} tokens a text"


def _note(document: dict[str, Any], *, spread: bool, timed: bool) -> str:
    parts = []
    if document.get("prompts"):
        parts.append(
            "step agreement: in every step of the original's decoding, masked codes that both would choose alike; "
            "final match: codes that come out the same when the recipe decodes alone; score: KL, in nats"
        )
    else:
        parts.append(
            "ratio: perplexity over the original's; score: the geometric mean of the ratios, or the mean KL where "
            "there is no perplexity"
        )
    if timed:
        parts.append("ms a forward: of the backbone on the fused engine, 512 packed tokens, replayed from a CUDA graph")
    if spread:
        parts.append("a ± b: mean and standard deviation over the calibrations")
        parts.append("beyond the spread: the difference exceeds twice the larger of the two standard deviations")
    parts.append(
        "best of its size: no other recipe with activations of the same width has fewer bits and a better score"
    )
    text = ". ".join(part[0].upper() + part[1:] for part in parts)
    return f"{text}."


def _plots(document: dict[str, Any]) -> list[str]:
    score = "KL, nats" if document.get("prompts") else "mean ratio of perplexities (or KL)"
    drawn = []
    for key, caption, axis in (
        ("effective_bits", "Quality over size; lower left is better", "bits a weight"),
        ("backbone_ms", "Quality over time; lower left is better", "ms a forward of 512 tokens"),
    ):
        points = [(row["label"], row["activations"], row[key], row["score"]) for row in document["recipes"]]
        if key == "effective_bits" or any(x is not None for _, _, x, _ in points):
            drawn.append(html._figure(caption, plots.pareto(points, caption.partition(";")[0], axis, score)))
    return drawn


def _calibrations(row: dict[str, Any]) -> str:
    needed = row["runs"][0]["fingerprint"]["stats"] is not None
    return str(len(row["runs"])) if needed else "none"


def _figure(text: dict[str, Any], std: dict[str, Any] | None, path: tuple[str, ...], form: str) -> str:
    """``1.205 ± 0.004``; without a spread the figure alone."""
    shown = number(_at(text, path), form)
    return shown if std is None or shown == NONE else f"{shown} ± {number(_at(std, path), form)}"


def _at(found: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        found = found.get(key) if found else None
    return found
