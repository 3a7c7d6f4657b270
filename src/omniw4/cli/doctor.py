"""``omniw4 doctor``: what this machine can run, and one line of advice for each problem."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from omniw4 import __version__
from omniw4.cli import options
from omniw4.cli.output import style
from omniw4.errors import VerdictError

if TYPE_CHECKING:
    from omniw4.doctor import Check

_MARKS = {"ok": ("ok", "green"), "note": ("-", "dim"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "red")}
_TITLES = {"software": "Software", "machine": "Machine", "gpu": "CUDA", "kernels": "Kernels"}


def command(json_mode: options.Json = False, quiet: options.Quiet = False) -> None:
    """Check versions, CUDA, the GPU, each kernel family, memory and disk; exit code 1 when something is wrong."""
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4.doctor import run, worst

    checks = run()
    status = worst(checks)
    document = {
        "omniw4": __version__,
        "python": platform.python_version(),
        "status": status,
        "checks": [check.to_dict() for check in checks],
    }
    output.result(report(checks), document)
    problems = [check.name for check in checks if check.status == "problem"]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise VerdictError(f"{count}: {', '.join(problems)}", hint="the lines after `->` say what helps")


def report(checks: list[Check]) -> str:
    """A line a check, grouped; advice below what it is about."""
    import sys

    width = max(len(check.name) for check in checks)
    lines = [f"omniw4 {__version__} ({os.path.dirname(os.path.dirname(os.path.abspath(__file__)))})"]
    for group, title in _TITLES.items():
        members = [check for check in checks if check.group == group]
        if members:
            lines += ["", title]
        for check in members:
            mark, colour = _MARKS[check.status]
            lines.append(f"  {style(f'{mark:<7}', colour, stream=sys.stdout)}  {check.name:<{width}}  {check.found}")
            if check.advice:
                lines.append(f"  {'':<7}  {'':<{width}}  -> {check.advice}")
    return "\n".join(lines)
