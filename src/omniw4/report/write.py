"""The three files of a report, in a folder that appears at once and replaces only an earlier report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omniw4.report import html, markdown
from omniw4.storage import OutputFolder, atomic_write, atomic_write_json

NAMES = ("report.json", "report.md", "report.html")


def write(document: dict[str, Any], out: str | Path, *, with_plots: bool = True) -> Path:
    """Write report.html, report.json and report.md.

    Raises:
        UsageError: plots are wanted and matplotlib is missing; nothing was written.
        OutputExistsError: the folder exists and holds no report.
        StorageError: it cannot be written.
    """
    pages = {"report.html": html.page(document, with_plots=with_plots), "report.md": markdown.page(document)}
    with OutputFolder.begin(out, {"verb": "report"}, overwrite=True, marker=NAMES[0]) as folder:
        atomic_write_json(folder.result / NAMES[0], document)
        for name, text in pages.items():
            atomic_write(folder.result / name, text)
        return folder.commit()
