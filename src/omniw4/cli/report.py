"""``omniw4 report DIR``: one page on a checkpoint that can be sent to a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omniw4.cli import options
from omniw4.cli.output import size


def command(
    directory: options.Checkpoint,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write; without it DIR/report.")
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results",
            metavar="FILE|NAME=FILE",
            help="What verify, bench, profile or roofline printed with --json; NAME: another recipe's verdict.",
        ),
    ] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Tables alone; needs no matplotlib.")] = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write recipe, sizes, errors, quality and times of a checkpoint as one HTML file, and as JSON and Markdown."""
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import report
    from omniw4.report import plots

    if not no_plots:
        plots.require()
    document = report.collect(directory, results or [])
    written = report.write(document, out or directory / "report", with_plots=not no_plots)
    if document["passed"] is None:
        verdict = f"`omniw4 verify {directory} --model MODEL --json > {directory / 'verify.json'}`"
        output.note(
            f"note: no verdict on this checkpoint, so the report tells no quality: {verdict}, then report again"
        )
    page = written / "report.html"
    shown = (out or directory / "report") / "report.html"
    output.result(f"Wrote {shown} ({size(page.stat().st_size)}), report.json and report.md beside it", document)
