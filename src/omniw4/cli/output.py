"""What the command line prints: the result on stdout, everything else on stderr. Imports no torch.

``--json`` prints one document on stdout and nothing on stderr but errors. ``--quiet`` silences progress and notes,
never the result, warnings or errors. Colours and bars need a terminal; ``NO_COLOR`` takes the colours away.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_STYLES = {"red": "31", "yellow": "33", "green": "32", "cyan": "36", "bold": "1", "dim": "2"}


class Output:
    """Where one run of a verb prints to.

    Args:
        json_mode: one JSON document on stdout, no talk.
        quiet: no progress and no notes.
    """

    def __init__(self, *, json_mode: bool = False, quiet: bool = False) -> None:
        self.json_mode = json_mode
        self.quiet = quiet or json_mode
        self._bar: ProgressBar | None = None

    def note(self, text: str) -> None:
        """A line of talk."""
        if not self.quiet:
            self._say(text)

    def warn(self, text: str, hint: str = "") -> None:
        """``warning: ...``, with a hint of what helps; silent only under ``--json``, whose document has warnings."""
        if not self.json_mode:
            self._say(_complaint("warning", "yellow", text, hint))

    def result(self, text: str, document: Any) -> None:
        """The result: ``text`` for a person, or ``document`` under ``--json``."""
        if self.json_mode:
            text = json.dumps(document, indent=2, allow_nan=False, default=str)
        try:
            if text:
                print(text, flush=True)
        except BrokenPipeError:  # the reader has seen enough; a verdict still to come counts nevertheless
            silence_stdout()

    @contextmanager
    def progress(self, title: str) -> Iterator[ProgressBar]:
        """A bar on a terminal; elsewhere a line every few seconds."""
        bar = ProgressBar(title, sys.stderr, silent=self.quiet)
        self._bar = bar
        try:
            yield bar
        finally:
            bar.close()
            self._bar = None

    def _say(self, text: str) -> None:
        if self._bar:
            self._bar.clear()
        print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """``quantizing ━━━━━╸━━━ 112/196  layers.16.mlp.down_proj  sqnr 21.4 dB  eta 02:57``.

    On a terminal the line is redrawn in place. Elsewhere a log gets lines without control characters: of steps that
    come :data:`PAUSE` seconds or more after the last line, and of the last of a stage.
    """

    WIDTH = 24
    PAUSE = 5.0

    def __init__(self, title: str, stream: TextIO, *, silent: bool = False) -> None:
        self._title, self._stream = title, stream
        self._silent = silent
        self._live = not silent and is_terminal(stream)
        self._drawn = False
        self._start = self._told = time.monotonic()
        self._first = 0

    def step(self, done: int, total: int, detail: str = "", eta: float | None = None, title: str = "") -> None:
        """Tell that ``done`` of ``total`` steps are over.

        Args:
            detail: what was just finished.
            eta: seconds left; without it, estimated from the pace.
            title: name of the stage, where a verb has several.
        """
        if self._silent:
            return
        self._title = title or self._title
        now = time.monotonic()
        if done <= self._first:
            self._first = max(0, done - 1)
        if eta is None and done > self._first:
            eta = (now - self._start) / (done - self._first) * (total - done)
        if not self._live and done < total and now - self._told < self.PAUSE:
            return
        tail = f"  eta {clock(eta)}" if eta is not None and done < total else ""
        counts = f"{done:>{len(str(total))}}/{total}"
        middle = f"  {detail}" if detail else ""
        if not self._live:
            self._told = now
            print(f"{self._title} {counts}{middle}{tail}", file=self._stream, flush=True)
            return
        filled = self.WIDTH * done // max(total, 1)
        bar = "━" * filled + ("╸" if filled < self.WIDTH else "") + "━" * (self.WIDTH - filled - 1)
        line = f" {self._title} {bar} {counts}{middle}{tail}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[2K{line[:width]}")
        self._stream.flush()
        self._drawn = True

    def start_at(self, done: int) -> None:
        """Steps that an earlier run did; they do not count for the pace."""
        self._first, self._start = done, time.monotonic()

    def clear(self) -> None:
        """Make room for a line of talk."""
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._drawn = False

    close = clear


def silence_stdout() -> None:
    """Where nobody reads stdout any more: what is left in its buffer goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(message: str, hint: str = "") -> None:
    """``error: ...``, an empty line, ``hint: ...``; nothing where stderr is gone, as after a hang-up."""
    with suppress(OSError):
        print(_complaint("error", "red", message, hint), file=sys.stderr, flush=True)


def _complaint(kind: str, colour: str, message: str, hint: str) -> str:
    text = f"{style(kind + ':', colour, 'bold')} {message}"
    return f"{text}\n\n{style('hint:', 'cyan', 'bold')} {hint}" if hint else text


def style(text: str, *names: str, stream: TextIO | None = None) -> str:
    """ANSI style for a stream (stderr unless told) that is a terminal and wants colours."""
    stream = stream or sys.stderr
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{';'.join(_STYLES[n] for n in names)}m{text}\x1b[0m"


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns aligned with spaces; the first ``left`` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    rule = "  ".join("─" * w for w in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def size(count: float) -> str:
    """Bytes for people: ``242 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def clock(seconds: float) -> str:
    """``02:57``, or ``1:02:57`` past the hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def figure(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)
