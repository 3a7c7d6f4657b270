"""The report as one HTML file: no script, nothing fetched, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import yaml

from omniw4.report import plots, tables
from omniw4.report.tables import Table


def page(document: dict[str, Any], *, with_plots: bool = True) -> str:
    """The whole page.

    Raises:
        UsageError: plots are wanted and matplotlib is missing.
    """
    body = "\n".join(part for part in _sections(document, with_plots=with_plots) if part)
    return shell(f"{tables.title(document)} · omniw4 report", body)


def shell(title: str, body: str) -> str:
    """A whole page around its body: no script, nothing fetched."""
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # an icon of no bytes, or the browser looks for one beside the file
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _sections(document: dict[str, Any], *, with_plots: bool) -> Iterable[str]:
    yield _head(document)
    if (quality := tables.quality(document)) is not None:
        yield "<h2>Quality</h2>" + _table(quality)
    if (gates := tables.gates(document)) is not None:
        yield "<h3>Gates</h3>" + _table(gates)
    if with_plots:
        yield "<h2>Where the error and the bytes are</h2>" + _plots(document)
    yield "<h2>Worst linears</h2>" + _table(tables.linears(document["worst"]))
    legend = (
        "error: ‖X(W−Ŵ)ᵀ‖² / ‖XWᵀ‖² on the calibration statistics, activations unquantized; data-free: the recipe rtn "
        "on the same linear; held-out: ‖ŷ−y‖² / ‖y‖² on other text, activations quantized."
    )
    every = _table(tables.linears(document["layers"])) + f'<p class="note">{legend}</p>'
    yield _folded(f"All {tables.count(len(document['layers']))}", every)
    if document["profile"]:
        yield "<h2>Where the time goes</h2>" + _profile(document, with_plots=with_plots)
    if document["bench"]:
        yield "<h2>Measured times</h2>" + _bench(document)
    if document["roofline"]:
        yield "<h2>Roofline</h2>" + _table(tables.roofline(document))
    if document["warnings"]:
        items = "".join(f"<li>{escape(text)}</li>" for text in document["warnings"])
        yield f'<h2 class="warn">Warnings</h2><ul>{items}</ul>'
    yield "<h2>Provenance</h2>" + _list(tables.provenance(document))
    recipe = yaml.safe_dump({"recipe": document["recipe"]}, sort_keys=False, default_flow_style=None, width=90)
    yield (
        "<h2>Recipe</h2><p>Save it as a file, and <code>omniw4 quantize --config FILE</code> does the same again.</p>"
        f"<pre>{escape(recipe)}</pre>"
    )
    yield f"<footer>omniw4 {escape(document['omniw4'])} · the same content is in report.json and report.md</footer>"


def _head(document: dict[str, Any]) -> str:
    verdict = ""
    if (found := tables.verdict(document)) is not None:
        kind, word = found
        verdict = f' · verification <b class="{kind}">{word}</b>'
    count = tables.count(len(document["layers"]))
    lead = f'<p class="lead">{escape(told)}</p>' if (told := tables.lead(document)) else ""
    cards = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in tables.facts(document)
    )
    return (
        f'<h1>{escape(tables.title(document))}</h1><p class="lead">{count} quantized{verdict}</p>{lead}'
        f'<div class="facts">{cards}</div>{_notes(document)}'
    )


def _plots(document: dict[str, Any]) -> str:
    layers, sizes = document["layers"], document["sizes"]
    figures = [("Relative output error of every linear, by block", plots.errors_by_block(layers))]
    if any(row["data_free_error"] for row in layers):
        caption = "Weight error against the data-free recipe; below the line, calibration helped"
        figures.append((caption, plots.gain_over_data_free(layers)))
    if any(row["rank"] for row in layers):
        caption = "Share of what the codes miss that the low-rank branch holds"
        figures.append((caption, plots.energy_by_block(layers)))
    distilled = (document["provenance"].get("distillation") or {}).get("report") or {}
    if distilled.get("log"):
        caption = "Distillation: the best held-out state is what the checkpoint holds"
        figures.append((caption, plots.distillation(distilled["log"], str(distilled.get("kind")))))
    figures.append(("Bytes of the quantized linears", plots.sizes(sizes["parts"], sizes["original_bytes"])))
    return f'<div class="plots">{"".join(_figure(*pair) for pair in figures)}</div>'


def _profile(document: dict[str, Any], *, with_plots: bool) -> str:
    engines = document["profile"]["engines"]
    parts = [_figure("Time of a step by kind of kernel", plots.breakdown(engines))] if with_plots else []
    parts.append(_table(tables.profile(document)))
    return "<p></p>".join(parts) + _notes(document["profile"])


def _bench(document: dict[str, Any]) -> str:
    environment = document["bench"].get("environment") or {}
    found = []
    for title, table in tables.bench(document):
        if title == tables.OPS and environment.get("device_type") == "cpu":  # how fast references are helps nobody
            found.append(_folded(f"All {tables.count(len(table.rows), 'op')}, the references on a CPU", _table(table)))
        else:
            found.append(f"<h3>{escape(title)}</h3>{_table(table)}")
    where = " · ".join(
        str(environment[key]) for key in ("device", "capability", "clocks", "torch") if environment.get(key)
    )
    return f'<p class="note">{escape(where)}</p>' + _notes(document["bench"]) + "".join(found)


def _notes(result: dict[str, Any]) -> str:
    return "".join(f'<p class="note">{escape(str(note))}</p>' for note in result.get("notes") or [])


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = []
    for index, row in enumerate(table.rows):
        kind = ' class="mine"' if index == table.mine else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{"".join(rows)}</table></div>{note}'


def _list(pairs: list[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"
