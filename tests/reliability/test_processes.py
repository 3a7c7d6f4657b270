"""Two processes that share a calibration or a quantization make the bytes of one."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kills
import pytest

from killing import folder_bytes
from omniw4.calibrate import Relay
from omniw4.cli import processes
from omniw4.errors import PeerError, UsageError
from omniw4.quantize.pipeline import share_of
from omniw4.quantize.plan import PlanEntry
from omniw4.tensors import LinearSpec


def run_together(world: int, *arguments: Any, folder: Path) -> list[int]:
    """The same command in several processes that torch.distributed joins; their exit codes."""
    return run_each([arguments] * world, folder)


def run_each(commands: Sequence[tuple[Any, ...]], folder: Path) -> list[int]:
    """A command for each of several processes; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(commands))}
    children = [
        kills.start(
            *arguments,
            stderr=folder / f"stderr-{rank}",
            environment={**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, arguments in enumerate(commands)
    ]
    return [kills.wait(child) for child in children]


@pytest.mark.parametrize(("world", "flags"), [(2, ("--batch-size", 2)), (2, ("--offload",)), (3, ())], ids=str)
def test_calibrate(model: Path, text: Path, tmp_path: Path, world: int, flags: tuple[Any, ...]) -> None:
    command = ("calibrate", model, "--dataset", text, *kills.CALIBRATE, *flags)
    assert run_together(world, *command, "--out", tmp_path / "together", folder=tmp_path) == [0] * world, told(tmp_path)
    assert kills.run(*command, "--out", tmp_path / "alone") == 0
    assert folder_bytes(tmp_path / "together") == folder_bytes(tmp_path / "alone")


def test_calibrate_through_a_checkpoint(model: Path, text: Path, checkpoint: Path, tmp_path: Path) -> None:
    command = ("calibrate", model, "--dataset", text, "--through", checkpoint, *kills.CALIBRATE)
    assert run_together(2, *command, "--out", tmp_path / "together", folder=tmp_path) == [0, 0], told(tmp_path)
    assert kills.run(*command, "--out", tmp_path / "alone") == 0
    assert folder_bytes(tmp_path / "together") == folder_bytes(tmp_path / "alone")


@pytest.mark.parametrize("world", [3])
def test_quantize(model: Path, stats: Path, checkpoint: Path, tmp_path: Path, world: int) -> None:
    out = tmp_path / "out"
    command = ("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", out)
    assert run_together(world, *command, folder=tmp_path) == [0] * world, told(tmp_path)
    assert folder_bytes(out) == folder_bytes(checkpoint)
    assert not out.with_name("out.partial").exists()


def test_quantize_resumes_what_one_process_began(model: Path, stats: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", out)
    child = kills.start(*command)
    while len(list(out.with_name("out.partial").glob("layers/*.safetensors"))) < 3:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it was through before it was killed"
    os.kill(child, 9)
    kills.wait(child)
    assert run_together(2, *command, "--resume", folder=tmp_path) == [0, 0], told(tmp_path)
    assert folder_bytes(out) == folder_bytes(checkpoint)


def test_more_processes_than_samples(model: Path, text: Path, tmp_path: Path) -> None:
    command = ("calibrate", model, "--dataset", text, "--samples", 2, "--seq-len", 64, "--batch-size", 2)
    codes = run_together(2, *command, "--out", tmp_path / "out", folder=tmp_path)
    assert codes == [2, 2], told(tmp_path)
    assert "2 processes have 1 batches" in told(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["calibrate", "quantize"])
@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_fails_the_other_says_so_and_ends(
    model: Path, text: Path, stats: Path, tmp_path: Path, verb: str, failing: int
) -> None:
    out = tmp_path / "out"

    def command(here: Path) -> tuple[Any, ...]:
        if verb == "quantize":
            return ("quantize", model, "--stats", here, *kills.QUANTIZE, "--out", out)
        return ("calibrate", here, "--dataset", text, *kills.CALIBRATE, "--out", out)

    commands = [command(stats if verb == "quantize" else model)] * 2
    commands[failing] = command(tmp_path / "nowhere")
    assert run_each(commands, tmp_path) == [2, 2], told(tmp_path)
    assert "nowhere" in (tmp_path / f"stderr-{failing}").read_text()
    assert "of this run ended before its work was done" in (tmp_path / f"stderr-{1 - failing}").read_text()
    assert not list(tmp_path.glob("out*"))


def test_a_process_that_outlives_the_first_writes_into_no_other_run(tmp_path: Path) -> None:
    note = tmp_path / "fingerprint.json"
    note.write_text("a")
    first = processes.FirstProcess(tmp_path)
    first.check()
    for happens in (lambda: note.write_text("b"), note.unlink):
        happens()
        with pytest.raises(PeerError, match="process 0 of this run ended"):
            first.check()
    with pytest.raises(PeerError):
        processes.FirstProcess(tmp_path).check()


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}])
def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, address: dict[str, str]) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="process 0 cannot meet the other 1: "):
        processes.find().join("cpu")


def told(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("stderr-*")))


@pytest.mark.parametrize("samples", [1, 2, 7, 32])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_samples_are_shared_in_whole_batches(samples: int, batch_size: int, world: int) -> None:
    batches = -(-samples // batch_size)
    relays = [Relay(rank, world) for rank in range(world)]
    if batches < world:
        with pytest.raises(UsageError):
            relays[0].share(samples, batch_size)
        return
    shares = [relay.share(samples, batch_size) for relay in relays]
    assert [i for share in shares for i in share] == list(range(samples))
    assert all(share.start % batch_size == 0 for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) < 2 * batch_size


def test_every_batch_has_one_process() -> None:
    batches = [[[PlanEntry(f"{k}.{i}", 64, k, False, LinearSpec())]] for i in range(3) for k in (64, 256, 128)]
    for world in (1, 2, 3, 5):
        shares = [share_of(batches, rank, world) for rank in range(world)]
        found = sorted(batch[0][0].path for share in shares for batch in share)
        assert found == sorted(batch[0][0].path for batch in batches)
        for share in shares:
            assert share == [batch for batch in batches if batch in share], "the order of the plan"


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("x", "2"), ("0", "-1")])
def test_a_place_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UsageError, match=f"RANK='{rank}'"):
        processes.find()
