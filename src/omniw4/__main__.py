"""``python -m omniw4`` and the command ``omniw4``.

Imports next to nothing before it handles signals: whoever presses Ctrl-C in the first moments gets one line, not the
traceback of an import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

_INTERRUPTED = 130  # as errors.EXIT_INTERRUPTED, which is not imported yet


def _end(*_: Any) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, b"error: interrupted; nothing was written\n")
    os._exit(_INTERRUPTED)


def _open_what_is_closed() -> None:
    """Give a program that was started without stdin, stdout or stderr a void in their place.

    Otherwise the next file that is opened gets their number, and what a library says on stderr is written into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> NoReturn:
    """Run the command line and end the process."""
    _open_what_is_closed()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:  # a job started to ignore it goes on doing so
            signal.signal(one, _end)
    from omniw4.cli import app

    app.main()


if __name__ == "__main__":
    main()
