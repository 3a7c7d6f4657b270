"""An output folder appears in one step, is replaced whole or not at all, and resumes only what is its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from storage_helpers import FINGERPRINT, fail_with, fill, interrupt, make

from killing import folder_bytes
from omniw4.errors import OutputExistsError, OutputLockedError, ResumeError, StorageError
from omniw4.storage import (
    OutputFolder,
    output_folder,
)


def test_folder_appears_with_commit(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with OutputFolder.begin(out, FINGERPRINT) as folder:
        assert not folder.resumed
        assert folder.partial == tmp_path / "a" / "out.partial"
        fill(folder, "x")
        assert not out.exists()
        assert folder.commit() == out
    assert folder_bytes(out) == {"0.txt": b"x", "1.txt": b"x", "2.txt": b"x"}
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_existing_output_is_refused_then_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    (out / "foreign").write_text("of the user")
    before = folder_bytes(out)
    with pytest.raises(OutputExistsError, match="exists") as caught:
        OutputFolder.begin(out, FINGERPRINT)
    assert "--overwrite" in caught.value.hint
    assert folder_bytes(tmp_path) == {f"out/{k}": v for k, v in before.items()}
    make(out, "new", overwrite=True)
    assert folder_bytes(tmp_path) == {f"out/{i}.txt": b"new" for i in range(3)}


def test_empty_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", "x")
    assert len(folder_bytes(tmp_path / "out")) == 3


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


def test_a_disk_that_is_full_from_the_start_is_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "atomic_write_json", fail_with(errno.ENOSPC))
    with pytest.raises(StorageError, match="No space left"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [KeyboardInterrupt, StorageError])
def test_a_verb_that_cannot_resume_leaves_nothing(tmp_path: Path, end: type[BaseException]) -> None:
    out = tmp_path / "out"
    make(out, "old")
    before = folder_bytes(tmp_path)

    def stop() -> None:
        with OutputFolder.begin(out, {"verb": "a"}, overwrite=True, resumable=False) as folder:
            fill(folder, "new")
            raise end("disk full")

    with pytest.raises(end):
        stop()
    assert folder_bytes(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_between_two_renames_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no atomic exchange, the old folder lies in ``partial`` for a moment."""
    out = tmp_path / "out"
    make(out, "old")
    before = folder_bytes(tmp_path)
    real = output_folder.os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == "result":
            monkeypatch.undo()
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(output_folder, "_exchange", lambda *_: False)
    monkeypatch.setattr(output_folder.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        make(out, "new", {"verb": "a"}, overwrite=True, resumable=False)
    assert folder_bytes(tmp_path) == before


def test_what_a_killed_run_left_is_dropped_only_by_its_own_verb(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(out, {"verb": "a"})
    with pytest.raises(OutputExistsError, match="interrupted run") as caught:
        OutputFolder.begin(out, {"verb": "b"}, resumable=False)
    assert "--resume" not in caught.value.hint
    assert "--overwrite" in caught.value.hint
    assert (tmp_path / "out.partial" / "layer0").exists()
    with OutputFolder.begin(out, {"verb": "a", "of": "another model"}, resumable=False) as folder:
        assert not folder.resumed
        assert not (folder.partial / "layer0").exists()
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_other_inputs_by_name(tmp_path: Path) -> None:
    interrupt(tmp_path / "out")
    before = folder_bytes(tmp_path)
    changed = {"recipe": {"rank": 32}, "model": "abc", "stats": "s"}
    with pytest.raises(ResumeError, match=r"recipe\.rank: 16 -> 32; stats: none -> 's'"):
        OutputFolder.begin(tmp_path / "out", changed, resume=True)
    after = {name: data for name, data in folder_bytes(tmp_path).items()}
    assert after == before


def test_resume_without_anything_begins(tmp_path: Path) -> None:
    with OutputFolder.begin(tmp_path / "out", FINGERPRINT, resume=True) as folder:
        assert not folder.resumed


@pytest.mark.parametrize("note", ["{", '{"a":' * 100_000, None], ids=["broken", "deep", "pipe"])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, note: str | None) -> None:
    partial = OutputFolder.partial_of(tmp_path / "out")
    (partial / "layers").mkdir(parents=True)
    for name in ("fingerprint.json", "committing.json"):
        os.mkfifo(partial / name) if note is None else (partial / name).write_text(note)
    (tmp_path / "out").mkdir()
    with pytest.raises(ResumeError, match=r"no readable fingerprint\.json"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT, resume=True)
    OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True).close()


def test_resume_never_wipes_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("x")
    with pytest.raises(ResumeError, match=r"no readable fingerprint\.json"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT, resume=True)
    with pytest.raises(OutputExistsError):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT)
    for resumable in (True, False):
        with pytest.raises(OutputExistsError, match="holds files of no interrupted run"):
            OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True, resumable=resumable)
    assert (tmp_path / "out.partial" / "thesis.txt").exists()


def test_an_output_named_as_the_place_of_another_run_is_kept(tmp_path: Path) -> None:
    make(tmp_path / "out.partial", "years of work")
    before = folder_bytes(tmp_path)
    with pytest.raises(OutputExistsError, match="holds files of no interrupted run"):
        OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True)
    assert folder_bytes(tmp_path) == before


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for refuse in (OutputFolder.check, lambda out: OutputFolder.begin(out, FINGERPRINT)):
        for name in ("loop", "loop/deep"):
            with pytest.raises(StorageError, match=r"cannot (write|make folder) .*loop"):
                refuse(tmp_path / name)


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
    assert folder_bytes(tmp_path / "out") == {"theirs": b"x"}


def test_failing_rename_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "old")
    with OutputFolder.begin(tmp_path / "out", FINGERPRINT, overwrite=True) as folder:
        fill(folder, "new")
        monkeypatch.setattr(output_folder, "_exchange", fail_with(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space left"):
            folder.commit()
    assert set(folder_bytes(tmp_path / "out").values()) == {b"old"}


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


def test_the_notes_on_a_finished_run_go_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which a file system lists names: without them the rest would be a riddle after a kill."""
    removed: list[str] = []
    real = output_folder._remove

    def remove(entry: Path) -> None:
        removed.append(entry.name)
        real(entry)

    with OutputFolder.begin(tmp_path / "out", FINGERPRINT) as folder:
        for name in ("a-layer", "z-layer"):
            (folder.partial / name).write_text("x")
        (folder.result / "file").write_text("x")
        monkeypatch.setattr(output_folder, "_remove", remove)
        folder.commit()
    assert sorted(removed[:-2]) == ["a-layer", "z-layer"]
    assert removed[-2:] == ["fingerprint.json", "committing.json"]
    assert not (tmp_path / "out.partial").exists()
