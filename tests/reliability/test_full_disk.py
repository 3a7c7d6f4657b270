"""A disk that is full after so many bytes, and folders that cannot be written, under each verb that writes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kills
import pytest

from killing import folder_bytes
from omniw4.cli import app
from omniw4.storage import files


class Quota:
    """A file system of so many bytes: files opened for writing take from it, and a write beyond it fails half-way.

    Stands in for ``open`` in the one module through which all output goes.
    """

    def __init__(self, left: int) -> None:
        self.left, self.taken = left, 0

    def open(self, path: Any, mode: str = "r", **keywords: Any) -> Any:
        file = open(path, mode, **keywords)  # noqa: SIM115
        return _Metered(file, self) if "x" in mode or "w" in mode else file

    def take(self, wanted: int) -> int:
        granted = min(wanted, self.left)
        self.left -= granted
        self.taken += granted
        return granted


class _Metered:
    def __init__(self, file: Any, quota: Quota) -> None:
        self._file, self._quota = file, quota

    def write(self, data: Any) -> int:
        wanted = memoryview(data).nbytes
        granted = self._quota.take(wanted)
        written: int = self._file.write(memoryview(data).cast("B")[:granted])
        if granted < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Metered:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[Quota]:
    quota = Quota(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", quota.open, raising=False)
        yield quota


def run(*arguments: Any) -> tuple[int, str]:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        return app.run([str(a) for a in arguments]), stderr.getvalue()


def refused(code: int, told: str) -> None:
    assert code == 2, told
    assert told.count("error: ") == 1, told
    assert "cannot " in told
    assert "\nhint: " in told
    assert "Traceback" not in told


def test_quantize_on_a_disk_that_grows(model: Path, stats: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Full after every eighth of what the run writes; each time more space is found, and the run resumed."""
    out = tmp_path / "out"
    command = ("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out")
    with disk_of(1 << 40) as endless:
        assert run(*command, tmp_path / "whole")[0] == 0
    total = endless.taken
    step = total // 8
    for number in range(8):
        with disk_of(step if number else 100):
            code, told = run(*command, out, *["--resume"] * (number > 0))
        if code == 0:
            break
        refused(code, told)
        assert "No space left on device" in told
        assert not out.exists()
        assert not list(tmp_path.rglob(f"*{files.TEMP_SUFFIX}")), "half a file was left"
    assert number >= 2, "the disk was never full"
    if code:
        assert run(*command, out, "--resume")[0] == 0
    assert folder_bytes(out) == folder_bytes(checkpoint)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_calibrate_on_a_full_disk(model: Path, text: Path, stats: Path, tmp_path: Path, share: float) -> None:
    out = tmp_path / "out"
    command = ("calibrate", model, "--dataset", text, *kills.CALIBRATE, "--out", out)
    with disk_of(int(share * sum(map(len, folder_bytes(stats).values())))):
        code, told = run(*command)
    refused(code, told)
    assert not out.exists()
    assert not list(tmp_path.rglob(f"*{files.TEMP_SUFFIX}"))
    assert run(*command)[0] == 0
    assert folder_bytes(out) == folder_bytes(stats)


@pytest.mark.parametrize("size", [0, 1000, 60_000])
def test_repack_on_a_full_disk(checkpoint: Path, tmp_path: Path, size: int) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(".omniw4-cache"))
    before = folder_bytes(copy)
    with disk_of(size):
        code, told = run("repack", copy, "--layout", "wgmma_s8")
    refused(code, told)
    assert folder_bytes(copy) == before
    assert run("repack", copy, "--layout", "wgmma_s8")[0] == 0


@pytest.mark.parametrize("where", ["/sys", "/proc", "/dev/null"])
def test_an_output_where_nothing_can_be_made(model: Path, stats: Path, text: Path, where: str) -> None:
    """Not even by root."""
    if not os.path.exists(where):
        pytest.skip(f"this system has no {where}")
    for verb in (("calibrate", model, "--dataset", text, *kills.CALIBRATE), ("quantize", model, "--stats", stats)):
        refused(*run(*verb, "--out", f"{where}/omniw4-test/out"))


def test_a_read_only_folder(checkpoint: Path) -> None:
    """As an ordinary user: root may write anywhere, so a root process first becomes nobody."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        copy = shutil.copytree(checkpoint, Path(name) / "copy", ignore=shutil.ignore_patterns(".omniw4-cache"))
        told = Path(name) / "stderr"
        told.touch()
        told.chmod(0o666)
        copy.chmod(0o555)
        before = folder_bytes(copy)
        child = kills.start("repack", copy, "--layout", "wgmma_s8", stderr=told, user=65534)
        refused(kills.wait(child), told.read_text())
        assert "Permission denied" in told.read_text()
        copy.chmod(0o755)
        assert folder_bytes(copy) == before
