"""Broken disks, small scripts, and runs that end early."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from omniw4.storage import (
    OutputFolder,
    atomic_write,
    files,
)

FINGERPRINT = {"recipe": {"rank": 16}, "model": "abc"}


def temporaries(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.name.endswith(files.TEMP_SUFFIX)]


class FullDisk(io.FileIO):
    """A file on a disk with room for ``room`` more bytes."""

    room = 1000
    code = errno.ENOSPC

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if len(data) > self.room:
            raise OSError(self.code, os.strerror(self.code))
        self.room -= len(data)
        return super().write(data)


def fail_with(code: int) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fill(folder: OutputFolder, content: str, count: int = 3) -> None:
    for number in range(count):
        atomic_write(folder.result / f"{number}.txt", content)


def make(out: Path, content: str, fingerprint: dict | None = None, **flags: bool) -> None:
    with OutputFolder.begin(out, fingerprint or FINGERPRINT, **flags) as folder:
        fill(folder, content)
        folder.commit()


def interrupt(out: Path, fingerprint: dict | None = None, **flags: bool) -> None:
    """A run that ended in the middle, with one finished layer."""
    folder = OutputFolder.begin(out, fingerprint or FINGERPRINT, **flags)
    atomic_write(folder.partial / "layer0", b"work")
    atomic_write(folder.result / "half", b"half a result")
    folder.close()
