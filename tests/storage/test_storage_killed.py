"""kill -9 at any instant leaves the old content or the new one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from storage_helpers import FINGERPRINT, make, temporaries

from killing import die_at_event, folder_bytes
from omniw4.errors import OutputExistsError
from omniw4.storage import (
    OutputFolder,
    atomic_write,
    output_folder,
    put_file,
    reserving,
)


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


@pytest.mark.parametrize("old", [b"", b"old" * 1000], ids=["new", "overwrite"])
def test_reserved_file_killed_at_every_instant(tmp_path: Path, old: bytes) -> None:
    """Old or new at once, and the next run leaves nothing of the killed one."""
    new, killed = b"new" * 5000, 0

    def write(path: Path) -> None:
        with reserving(path, overwrite=True):
            put_file(path, new, overwrite=True)

    while True:
        path = tmp_path / str(killed) / "deep" / "own.jsonl"
        if old:
            path.parent.mkdir(parents=True)
            path.write_bytes(old)
        if not die_at_event(killed + 1, lambda path=path: write(path)):
            break
        killed += 1
        assert (path.read_bytes() if path.exists() else b"") in (old, new), f"killed at event {killed}"
        write(path)
        assert folder_bytes(path.parent) == {"own.jsonl": new}, f"killed at event {killed}"
    assert killed >= 8
    assert folder_bytes(path.parent) == {"own.jsonl": new}


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
        found = folder_bytes(out) if out.exists() else {}
        if exchange:
            assert found in (old, new), f"killed at event {killed}"
        if found == new and first:
            with pytest.raises(OutputExistsError):
                OutputFolder.begin(out, FINGERPRINT, resume=True)
        else:
            with OutputFolder.begin(out, FINGERPRINT, resume=True, overwrite=True):
                assert (folder_bytes(out) if out.exists() else {}) in (old, new), f"killed at event {killed}"
            make(out, "new", resume=True, overwrite=True)
        assert folder_bytes(folder) == {f"out/{name}": data for name, data in new.items()}, f"killed at event {killed}"
    assert killed >= 20
    assert folder_bytes(out) == new


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
            files_found = folder_bytes(out)
            assert set(files_found) == {"a", "b", "c"}, case
            generation = json.loads(files_found["c"])["generation"]
            for name in ("a", "b"):
                assert set(files_found[name][-300_000:]) == {generation}, case
                assert torch.equal(load_file(out / name)["x"], torch.full((300_000,), generation, dtype=torch.uint8))
    with OutputFolder.begin(out, {"run": 1}, overwrite=True, resume=True) as folder:
        assert temporaries(folder.partial) == []
