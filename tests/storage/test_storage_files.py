"""A file is whole or absent, whatever happens: full disk, no permission."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from pathlib import Path

import pytest
from storage_helpers import FullDisk, fail_with, run_script

from killing import folder_bytes
from omniw4.errors import OutputExistsError, StorageError
from omniw4.storage import (
    atomic_copy,
    atomic_write,
    atomic_write_json,
    check_file,
    files,
    put_file,
    sha256_file,
)
from omniw4.storage.files import replacing


def test_atomic_write_and_copy(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "grün")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "grün"
    atomic_write(tmp_path / "a", b"new")
    atomic_copy(tmp_path / "a", tmp_path / "b")
    assert folder_bytes(tmp_path) == {"a": b"new", "b": b"new"}
    assert sha256_file(tmp_path / "a") == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"


def test_json_has_no_nan(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "x.json", {"b": float("nan"), "a": [1.5, float("-inf"), (2,)], "c": True})
    assert json.loads((tmp_path / "x.json").read_text()) == {"b": None, "a": [1.5, None, [2]], "c": True}


def test_file_mode_follows_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("before", [None, b"old"], ids=["new file", "old file"])
def test_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, before: bytes | None
) -> None:
    target = tmp_path / "a"
    if before is not None:
        target.write_bytes(before)
    monkeypatch.setattr(FullDisk, "code", code)
    monkeypatch.setattr(files, "open", lambda path, mode: io.BufferedWriter(FullDisk(path, mode)), raising=False)
    with pytest.raises(StorageError, match=rf"cannot write '.*a': {os.strerror(code)}") as caught:
        atomic_write(target, b"x" * 100_000)
    assert caught.value.hint or code == errno.EIO
    assert folder_bytes(tmp_path) == ({} if before is None else {"a": before})


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_failing_call_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail_with(code))
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            atomic_write(target, b"new")
    assert caught.value.hint
    assert folder_bytes(tmp_path) == {"a": b"old"}


def test_missing_folder_and_missing_source(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write '.*nowhere/a': No such file"):
        atomic_write(tmp_path / "nowhere" / "a", b"")
    with pytest.raises(StorageError, match=r"cannot read '.*nothing': No such file"):
        atomic_copy(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(StorageError, match=r"cannot read '.*nothing'"):
        sha256_file(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_read_only_folder() -> None:
    """As an ordinary user: root may write anywhere, so a root process first becomes nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "locked"
        folder.mkdir()
        os.chmod(name, 0o755)
        folder.chmod(0o555)
        done = run_script(
            """
            import os, sys
            from omniw4.errors import StorageError
            from omniw4.storage import OutputFolder, TensorFileWriter, atomic_write
            if os.geteuid() == 0:
                os.setuid(65534)
            def tensor_file(path):
                with TensorFileWriter(path, {}):
                    pass
            for make in (lambda p: atomic_write(p, b""), tensor_file, lambda p: OutputFolder.begin(p, {})):
                try:
                    make(sys.argv[1] + "/x")
                except StorageError as e:
                    print(e, "|", e.hint)
            """,
            folder,
        )
        lines = done.stdout.splitlines()
        assert len(lines) == 3, done.stderr
        assert all("Permission denied | choose a folder you can write to" in line for line in lines)
        assert list(folder.iterdir()) == []


def test_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """A write that the kernel itself cuts short, in the middle of a tensor file."""
    done = run_script(
        """
        import resource, sys
        from omniw4.errors import StorageError
        from omniw4.storage import TensorFileWriter
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with TensorFileWriter(sys.argv[1], {"a": ("U8", [1000]), "b": ("U8", [200_000])}) as w:
                w.write_bytes("a", [bytes(1000)])
                w.write_bytes("b", (bytes(50_000) for _ in range(4)))
        except StorageError as e:
            print(e)
        """,
        tmp_path / "x.safetensors",
    )
    assert "x.safetensors': File too large" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_fault_of_the_file(tmp_path: Path) -> None:
    """Progress is told while a file is being written, and whoever read it may be gone."""
    with pytest.raises(BrokenPipeError), replacing(tmp_path / "out"):
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_a_user_names(tmp_path: Path) -> None:
    """The check before the work refuses what writing would, and makes nothing."""
    out = tmp_path / "a" / "b" / "out.jsonl"
    check_file(out)
    assert list(tmp_path.iterdir()) == []
    put_file(out, "first")
    for refuse in (check_file, lambda path: put_file(path, "second")):
        with pytest.raises(OutputExistsError, match=r"out\.jsonl' exists"):
            refuse(out)
    check_file(out, overwrite=True)
    assert out.read_text() == "first"
    put_file(out, "second", overwrite=True)
    assert [(p.name, p.read_text()) for p in out.parent.iterdir()] == [("out.jsonl", "second")]
    inside, folder = out / "inside.jsonl", out.parent
    for refuse in (check_file, lambda path, **flags: put_file(path, "third", **flags)):
        with pytest.raises(StorageError, match=r"cannot write .*inside\.jsonl"):
            refuse(inside)
        with pytest.raises(OutputExistsError, match="is no file"):
            refuse(folder, overwrite=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(OutputExistsError, match="is no file"):
        check_file(tmp_path / "dangling", overwrite=True)
