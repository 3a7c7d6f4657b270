"""Kill a piece of work at each of its file operations, and look at what is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def die_at_event(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a forked process that kills itself before its number-th file operation; True if it got there.

    Python announces every open, rename, remove, mkdir and folder listing to audit hooks before it happens; fsync is
    announced by hand. So numbers 1, 2, 3, … are all the states of the disk that a kill can leave.
    """
    child = os.fork()
    if child == 0:
        try:
            left = number

            def count(event: str, arguments: tuple = ()) -> None:
                nonlocal left
                if event == "open" or event.split(".")[0] in ("os", "shutil", "ctypes"):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = lambda descriptor: count("os.fsync")  # type: ignore[assignment]  # a kill loses no page cache
            sys.addaudithook(count)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: relative name -> content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
