"""The report as Markdown: for an issue, a commit or a model card."""

from __future__ import annotations

from typing import Any

import yaml

from omniw4.report import tables
from omniw4.report.tables import Table


def page(document: dict[str, Any]) -> str:
    parts = [f"# {_text(tables.title(document))}", f"{tables.count(len(document['layers']))} quantized."]
    if told := tables.lead(document):
        parts.append(f"{_text(told)}.")
    if (found := tables.verdict(document)) is not None:
        parts.append(f"Verification: **{found[1]}**.")
    parts.append("\n".join(f"- **{value}** {_text(what)}" for value, what in tables.facts(document)))
    parts += [_text(f"Note: {note}.") for note in document["notes"]]
    if (quality := tables.quality(document)) is not None:
        parts += ["## Quality", _table(quality)]
    if (gates := tables.gates(document)) is not None:
        parts += ["### Gates", _table(gates)]
    parts += ["## Worst linears", _table(tables.linears(document["worst"]))]
    if document["profile"]:
        parts += ["## Where the time goes", _table(tables.profile(document))]
        parts += [_text(note) for note in document["profile"].get("notes") or []]
    if document["bench"]:
        parts.append("## Measured times")
        parts += [_text(note) for note in document["bench"].get("notes") or []]
        for title, table in tables.bench(document):
            parts += [f"### {title}", _table(table)]
    if document["roofline"]:
        parts += ["## Roofline", _table(tables.roofline(document))]
    if document["warnings"]:
        parts += ["## Warnings", "\n".join(f"- {_text(text)}" for text in document["warnings"])]
    parts += ["## Provenance", _table(Table(("", ""), list(tables.provenance(document))))]
    recipe = yaml.safe_dump({"recipe": document["recipe"]}, sort_keys=False, default_flow_style=None, width=100)
    parts += ["## Recipe", f"```yaml\n{recipe}```"]
    parts += ["## All linears", _table(tables.linears(document["layers"]))]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [_row(table.header), _row(["---"] + ["---:"] * (len(table.header) - 1))]
    for index, row in enumerate(table.rows):
        cells = [f"**{_text(cell)}**" if index == table.mine and cell else _text(cell) for cell in row]
        lines.append(_row(cells))
    return "\n".join(lines) + (f"\n\n{_text(table.note)}" if table.note else "")


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    for character in "\\|*_<`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
