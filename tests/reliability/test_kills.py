"""kill -9 at random instants of the verbs; `make soak` does 200 of each."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import kills
import pytest

TRIALS = 3  # of each verb


@pytest.mark.parametrize("name", [verb.name for verb in kills.verbs(*4 * [Path()])])
def test_killed_at_random_instants(
    model: Path, text: Path, stats: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    verb = next(verb for verb in kills.verbs(model, text, stats, checkpoint) if verb.name == name)
    tally = kills.kill_often(verb, tmp_path / "kills", TRIALS, seed=1)
    assert tally.trials == TRIALS
    assert tally.killed > 0, tally


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_signals_end_with_130_and_keep_the_work(
    model: Path, stats: Path, checkpoint: Path, tmp_path: Path, with_signal: signal.Signals
) -> None:
    out, told = tmp_path / "out", tmp_path / "stderr"
    command = ("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", out)
    child = kills.start(*command, stderr=told)
    _wait_for_layers(out, 2)
    os.kill(child, with_signal)
    assert kills.wait(child) == 130, told.read_text()
    assert "error: interrupted; " in told.read_text()
    assert "Traceback" not in told.read_text()
    assert not out.exists()
    assert kills.run(*command, "--resume") == 0
    assert kills.folder_bytes(out) == kills.folder_bytes(checkpoint)


def test_the_lock_is_the_process(model: Path, stats: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A second process is refused while the first lives, stopped or not, and let in the moment it is dead."""
    out, told = tmp_path / "out", tmp_path / "stderr"
    command = ("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", out)
    child = kills.start(*command)
    _wait_for_layers(out, 1)
    os.kill(child, signal.SIGSTOP)
    for flags in ((), ("--resume",), ("--overwrite",)):
        assert kills.wait(kills.start(*command, *flags, stderr=told)) == 2
        assert "another process" in told.read_text()
    os.kill(child, signal.SIGKILL)
    assert kills.wait(child) == -signal.SIGKILL
    assert kills.run(*command, "--resume") == 0
    assert kills.folder_bytes(out) == kills.folder_bytes(checkpoint)


def _wait_for_layers(out: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(out.with_name(f"{out.name}.partial").glob("layers/*.safetensors"))) < count:
        assert time.monotonic() < deadline, "the run makes no layers"
        time.sleep(0.002)
