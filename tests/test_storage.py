"""Files and folders that are whole or absent, whatever happens: full disk, no permission, a kill at any instant."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from killing import die_at_event
from omniw4.errors import OutputExistsError, OutputLockedError, ResumeError, StorageError
from omniw4.storage import (
    OutputFolder,
    TensorFileWriter,
    atomic_copy,
    atomic_write,
    atomic_write_json,
    files,
    output_folder,
    sha256_file,
)

FINGERPRINT = {"recipe": {"rank": 16}, "model": "abc"}


def temporaries(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.name.endswith(files.TEMP_SUFFIX)]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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


# ---- single files


def test_atomic_write_and_copy(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "grün")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "grün"
    atomic_write(tmp_path / "a", b"new")
    atomic_copy(tmp_path / "a", tmp_path / "b")
    assert read_folder(tmp_path) == {"a": b"new", "b": b"new"}
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
    assert read_folder(tmp_path) == ({} if before is None else {"a": before})


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
    assert read_folder(tmp_path) == {"a": b"old"}


def test_missing_folder_and_missing_source(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write '.*nowhere/a': No such file"):
        atomic_write(tmp_path / "nowhere" / "a", b"")
    with pytest.raises(StorageError, match=r"cannot read '.*nothing': No such file"):
        atomic_copy(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(StorageError, match=r"cannot read '.*nothing'"):
        sha256_file(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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


# ---- tensor files

TENSORS = {
    "half": torch.randn(3, 5).half(),
    "double": torch.randn(2).double(),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "brain": torch.randn(7).bfloat16(),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "größe": torch.ones(1),
}
LAYOUT = {name: (t.dtype, t.shape) for name, t in TENSORS.items()}


@pytest.mark.parametrize("order", [list(TENSORS), list(reversed(TENSORS))], ids=["in order", "backwards"])
def test_tensor_file_reads_back(tmp_path: Path, order: list[str]) -> None:
    path = tmp_path / "x.safetensors"
    with TensorFileWriter(path, LAYOUT, {"format": "pt", "a": "b"}) as writer:
        for name in order:
            writer.write(name, TENSORS[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "b"}
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_tensor_file_is_aligned_and_always_the_same(tmp_path: Path) -> None:
    for number, order in enumerate([list(TENSORS), list(reversed(TENSORS))]):
        with TensorFileWriter(
            tmp_path / str(number), LAYOUT, {"b": "1", "a": "2"} if number else {"a": "2", "b": "1"}
        ) as w:
            for name in order:
                w.write(name, TENSORS[name])
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    raw = (tmp_path / "0").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_strided_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "t": base.T,
        "step": base[:, ::2],
        "wide": base[:1].expand(3, 6),
        "grad": torch.ones(2, requires_grad=True),
    }
    with TensorFileWriter(tmp_path / "x", {n: (t.dtype, t.shape) for n, t in views.items()}) as writer:
        for name, tensor in views.items():
            writer.write(name, tensor)
    found = load_file(tmp_path / "x")
    for name, tensor in views.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda w: w.write("b", torch.ones(3)), "'b' is not in the layout"),
        (lambda w: w.write("a", torch.ones(4)), "'a' is"),
        (lambda w: w.write("a", torch.ones(3).half()), "'a' is"),
        (lambda w: (w.write("a", torch.ones(3)), w.write("a", torch.ones(3))), "'a' was written already"),
        (lambda w: w.write_bytes("a", [b"123"]), "got -9 bytes"),
        (lambda w: w.write_bytes("a", [b"1" * 13]), r"got \+1 bytes"),
        (lambda w: None, "never written: a"),
    ],
)
def test_misuse_of_a_tensor_file_leaves_nothing(tmp_path: Path, misuse: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message), TensorFileWriter(tmp_path / "x", {"a": ("F32", [3])}) as writer:
        misuse(writer)
    assert list(tmp_path.iterdir()) == []


def test_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="dtype complex128 cannot be stored"):
        TensorFileWriter(tmp_path / "x", {"a": (torch.complex128, [1])})


def test_writing_needs_the_memory_of_one_chunk(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        from omniw4.storage import TensorFileWriter
        def peak():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        with TensorFileWriter(sys.argv[1], {f"t{i}": ("U8", [8 << 20]) for i in range(8)}) as w:
            for i in range(8):
                w.write_bytes(f"t{i}", (bytes(1 << 20) for _ in range(8)))
        print(peak() - before)
        """,
        tmp_path / "x",
    )
    assert int(done.stdout) < 8 * 1024, f"{done.stdout} KiB above the start for a file of 64 MiB {done.stderr}"


# ---- output folders


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


def test_folder_appears_with_commit(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with OutputFolder.begin(out, FINGERPRINT) as folder:
        assert not folder.resumed
        assert folder.partial == tmp_path / "a" / "out.partial"
        fill(folder, "x")
        assert not out.exists()
        assert folder.commit() == out
    assert read_folder(out) == {"0.txt": b"x", "1.txt": b"x", "2.txt": b"x"}
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_existing_output_is_refused_then_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    (out / "foreign").write_text("of the user")
    before = read_folder(out)
    with pytest.raises(OutputExistsError, match="exists") as caught:
        OutputFolder.begin(out, FINGERPRINT)
    assert "--overwrite" in caught.value.hint
    assert read_folder(tmp_path) == {f"out/{k}": v for k, v in before.items()}
    make(out, "new", overwrite=True)
    assert read_folder(tmp_path) == {f"out/{i}.txt": b"new" for i in range(3)}


def test_empty_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", "x")
    assert len(read_folder(tmp_path / "out")) == 3


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("file")
    with pytest.raises(OutputExistsError, match="not a folder"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True)
    (tmp_path / "b.partial").write_text("file")
    with pytest.raises(StorageError, match="cannot make folder"):
        OutputFolder.begin(tmp_path / "b", FINGERPRINT, overwrite=True)
    assert (tmp_path / "b.partial").read_text() == "file"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_current_folder_and_its_parents_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "precious").write_text("x")
    monkeypatch.chdir(work)
    with pytest.raises(OutputExistsError, match="will not be replaced"):
        OutputFolder.begin(name, FINGERPRINT, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["work"]


def test_interrupted_run_needs_a_flag(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(out)
    with pytest.raises(OutputExistsError, match="interrupted run") as caught:
        OutputFolder.begin(out, FINGERPRINT)
    assert "--resume" in caught.value.hint
    with OutputFolder.begin(out, FINGERPRINT, resume=True) as folder:
        assert folder.resumed
        assert (folder.partial / "layer0").read_bytes() == b"work"
        assert list(folder.result.iterdir()) == []
    with OutputFolder.begin(out, FINGERPRINT, overwrite=True) as folder:
        assert not folder.resumed
        assert not (folder.partial / "layer0").exists()
        fill(folder, "x")
        folder.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_resume_refuses_other_inputs_by_name(tmp_path: Path) -> None:
    interrupt(tmp_path / "out")
    before = read_folder(tmp_path)
    changed = {"recipe": {"rank": 32}, "model": "abc", "stats": "s"}
    with pytest.raises(ResumeError, match=r"recipe\.rank: 16 -> 32; stats: None -> 's'"):
        OutputFolder.begin(tmp_path / "out", changed, resume=True)
    after = {name: data for name, data in read_folder(tmp_path).items()}
    assert after == before


def test_resume_without_anything_begins(tmp_path: Path) -> None:
    with OutputFolder.begin(tmp_path / "out", FINGERPRINT, resume=True) as folder:
        assert not folder.resumed


def test_resume_never_wipes_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("x")
    with pytest.raises(ResumeError, match=r"no readable fingerprint\.json"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT, resume=True)
    with pytest.raises(OutputExistsError):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT)
    assert (tmp_path / "out.partial" / "thesis.txt").exists()


def test_fingerprint_survives_json(tmp_path: Path) -> None:
    fingerprint = {"skip": ("a", "b"), "x": float("nan"), 3: None}
    interrupt(tmp_path / "out", fingerprint)
    with OutputFolder.begin(tmp_path / "out", fingerprint, resume=True) as folder:
        assert folder.resumed


def test_run_that_did_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="early"), OutputFolder.begin(tmp_path / "out", FINGERPRINT):
        raise RuntimeError("early")
    assert list(tmp_path.iterdir()) == []


def test_commit_of_nothing_is_a_mistake(tmp_path: Path) -> None:
    with (
        OutputFolder.begin(tmp_path / "out", FINGERPRINT) as folder,
        pytest.raises(ValueError, match="nothing to commit"),
    ):
        folder.commit()
    assert list(tmp_path.iterdir()) == []


def test_output_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    with OutputFolder.begin(tmp_path / "out", FINGERPRINT) as folder:
        fill(folder, "mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
        with pytest.raises(OutputExistsError):
            folder.commit()
    assert read_folder(tmp_path / "out") == {"theirs": b"x"}


def test_failing_rename_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "old")
    with OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True) as folder:
        fill(folder, "new")
        monkeypatch.setattr(output_folder, "_exchange", fail_with(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space left"):
            folder.commit()
    assert set(read_folder(tmp_path / "out").values()) == {b"old"}


def test_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = """
        import sys, time
        from omniw4.storage import OutputFolder
        folder = OutputFolder.begin(sys.argv[1], {"recipe": {"rank": 16}, "model": "abc"})
        (folder.partial / "layer0").write_text("work")
        print("begun", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputLockedError, match="another process"):
                OutputFolder.begin(out, FINGERPRINT, **flags)
        child.kill()
    with OutputFolder.begin(out, FINGERPRINT, resume=True) as folder:
        assert folder.resumed


# ---- kill -9


def test_file_killed_at_every_instant(tmp_path: Path) -> None:
    path, old, new = tmp_path / "a", b"old" * 1000, b"new" * 5000
    killed = 0
    while True:
        path.write_bytes(old)
        if not die_at_event(killed + 1, lambda: atomic_write(path, new)):
            break
        killed += 1
        assert path.read_bytes() in (old, new), f"killed at event {killed}"
    assert killed >= 5
    assert path.read_bytes() == new


@pytest.mark.parametrize("exchange", [True, False], ids=["atomic exchange", "two renames"])
@pytest.mark.parametrize("first", [True, False], ids=["new folder", "overwrite"])
def test_folder_killed_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, first: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    if not exchange:
        monkeypatch.setattr(output_folder, "_exchange", lambda a, b: False)
    old = {} if first else {f"{i}.txt": b"old" for i in range(3)}
    new = {f"{i}.txt": b"new" for i in range(3)}
    killed = 0
    while True:
        folder = tmp_path / str(killed)
        folder.mkdir()
        out = folder / "out"
        if not first:
            make(out, "old")
        work = lambda out=out: make(out, "new", overwrite=not first)  # noqa: E731
        if not die_at_event(killed + 1, work):
            break
        killed += 1
        found = read_folder(out) if out.exists() else {}
        if exchange:
            assert found in (old, new), f"killed at event {killed}"
        if found == new and first:
            with pytest.raises(OutputExistsError):
                OutputFolder.begin(out, FINGERPRINT, resume=True)
        else:
            with OutputFolder.begin(out, FINGERPRINT, resume=True, overwrite=True):
                assert (read_folder(out) if out.exists() else {}) in (old, new), f"killed at event {killed}"
            make(out, "new", resume=True, overwrite=True)
        assert read_folder(folder) == {f"out/{name}": data for name, data in new.items()}, f"killed at event {killed}"
    assert killed >= 20
    assert read_folder(out) == new


WRITE_FOREVER = """
    import sys
    from omniw4.storage import OutputFolder, TensorFileWriter, atomic_write_json
    out, fingerprint, size = sys.argv[1], {"run": 1}, 300_000
    generation = 0
    print("ready", flush=True)
    while True:
        generation += 1
        with OutputFolder.begin(out, fingerprint, overwrite=True, resume=True) as folder:
            for name in ("a", "b"):
                with TensorFileWriter(folder.result / name, {"x": ("U8", [size])}) as w:
                    w.write_bytes("x", (bytes([generation % 256]) * (size // 10) for _ in range(10)))
            atomic_write_json(folder.result / "c", {"generation": generation % 256})
            folder.commit()
"""


def test_process_killed_at_random_moments(tmp_path: Path) -> None:
    seed = 20_240_501
    rng = random.Random(seed)
    out = tmp_path / "out"
    for round_ in range(6):
        command = [sys.executable, "-c", textwrap.dedent(WRITE_FOREVER), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.001, 0.15))
            child.kill()
        case = f"seed {seed}, round {round_}"
        if out.exists():
            files_found = read_folder(out)
            assert set(files_found) == {"a", "b", "c"}, case
            generation = json.loads(files_found["c"])["generation"]
            for name in ("a", "b"):
                assert set(files_found[name][-300_000:]) == {generation}, case
                assert torch.equal(load_file(out / name)["x"], torch.full((300_000,), generation, dtype=torch.uint8))
    with OutputFolder.begin(out, {"run": 1}, overwrite=True, resume=True) as folder:
        assert temporaries(folder.partial) == []
