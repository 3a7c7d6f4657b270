"""``python -m omniw4`` and the command ``omniw4``.

Imports next to nothing before it handles signals: whoever presses Ctrl-C in the first moments gets one line, not the
traceback of an import.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NoReturn

_INTERRUPTED = 130  # as errors.EXIT_INTERRUPTED, which is not imported yet


def _end(*_: Any) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, b"error: interrupted; nothing was written\n")
    os._exit(_INTERRUPTED)


def main() -> NoReturn:
    """Run the command line and end the process."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:  # a job started to ignore it goes on doing so
            signal.signal(one, _end)
    from omniw4.cli import app

    app.main()


if __name__ == "__main__":
    main()
