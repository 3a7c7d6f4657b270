"""The three files of a report, each replaced in one step; whatever else is in their folder stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omniw4.report import html, markdown
from omniw4.storage import OwnFiles, json_text

FILES = OwnFiles("report.json", ("report.md", "report.html"), frozenset({"omniw4", "hash", "quality", "layers"}))


def write(document: dict[str, Any], out: str | Path, *, with_plots: bool = True) -> Path:
    """Write report.html, report.json and report.md; an earlier report is replaced, no other file is.

    Raises:
        UsageError: plots are wanted and matplotlib is missing; nothing was written.
        OutputExistsError: the folder holds files of these names that are no report; nothing was written.
        StorageError: it cannot be written.
    """
    files: dict[str, str | Path] = {
        "report.json": json_text(document),
        "report.html": html.page(document, with_plots=with_plots),
        "report.md": markdown.page(document),
    }
    return FILES.put(out, files)
