"""Killed, interrupted, out of disk: nothing half-written is accepted, and --resume gives the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import CALIBRATE, LAYERS, Run, environment

LINEARS = 7 * LAYERS
RANK = ("--set", "recipe.lowrank.rank=8")  # as the fixture `checkpoint`


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def heed_signals() -> None:
    """In a child, before it starts: tests that run in the background or under nohup are told to ignore some."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omniw4", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(), start_new_session=True, preexec_fn=heed_signals, **pipes)


def stop_when(process: subprocess.Popen[str], reached: Callable[[], bool], with_signal: int) -> tuple[int, str]:
    """Send the signal as soon as the condition holds; exit code and stderr."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not reached() and time.monotonic() < deadline:
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(with_signal)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def layers_in(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.partial").glob("layers/*.safetensors")))


def refuse_every_reader(run: Run, out: Path, qwen3: Path) -> None:
    """Neither the output nor what lies beside it passes for a checkpoint."""
    assert not out.exists()
    for folder in (out, out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial") / "result"):
        assert run("inspect", folder).code == 2
        assert run("repack", folder).code == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_anywhere_and_resume(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path, seed: int
) -> None:
    """kill -9 after random numbers of linears, three times in a row, then the bytes of an uninterrupted run."""
    rng = random.Random(seed)
    out = tmp_path / "out"
    command = ("quantize", qwen3, "--stats", stats, "--out", out, *RANK)
    points = sorted(rng.sample(range(1, LINEARS), 3))
    for attempt, point in enumerate(points):
        process = start(*command, *["--resume"] * (attempt > 0))
        code, stderr = stop_when(process, lambda point=point: layers_in(out) >= point, signal.SIGKILL)
        assert code == -signal.SIGKILL, stderr
        assert layers_in(out) >= point
        refuse_every_reader(run, out, qwen3)
        run(*command).failed(2, "--resume", "--overwrite")
    finished = layers_in(out)
    ran = run(*command, "--resume")
    assert ran.code == 0, ran.stderr
    assert f"resuming: {finished} of {LINEARS} linears are done" in ran.stderr
    assert contents(out) == contents(checkpoint)
    assert not out.with_name("out.partial").exists()


def test_kill_while_the_folder_is_assembled(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """At the first file of the result, and at the last rename before it appears."""
    out = tmp_path / "out"
    command = ["quantize", str(qwen3), "--stats", str(stats), "--out", str(out), *RANK]
    script = (
        "import os, signal, sys; from omniw4 import checkpoint; from omniw4.checkpoint import writer\n"
        "real = getattr(writer, sys.argv[1])\n"
        "def die(*a, **k):\n"
        "    if sys.argv[2] == 'after': real(*a, **k)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "setattr(writer, sys.argv[1], die)\n"
        "from omniw4.cli.app import main; main(sys.argv[3:])"
    )
    for where, when in (("sha256_file", "before"), ("atomic_write", "after"), ("atomic_write_json", "after")):
        flags = [] if not out.with_name("out.partial").exists() else ["--resume"]
        done = subprocess.run(
            [sys.executable, "-c", script, where, when, *command, *flags], capture_output=True, env=environment()
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert not out.exists()
    ran = run(*command, "--resume")
    assert ran.code == 0, ran.stderr
    assert contents(out) == contents(checkpoint)


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_says_what_is_kept(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path, with_signal: int
) -> None:
    out = tmp_path / "out"
    command = ("quantize", qwen3, "--stats", stats, "--out", out, *RANK)
    code, stderr = stop_when(start(*command), lambda: layers_in(out) >= 3, with_signal)
    assert code == 130, stderr
    last = [line for line in stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert last[0].startswith("error: interrupted; ")
    assert f"of {LINEARS} linears are kept in out.partial/" in last[0]
    assert last[1] == "hint: go on with --resume"
    assert "Traceback" not in stderr
    refuse_every_reader(run, out, qwen3)
    assert run(*command, "--resume").code == 0
    assert contents(out) == contents(checkpoint)


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_the_program_starts_is_one_line(with_signal: int) -> None:
    """In the midst of its first imports, before there is a command that could say anything."""
    script = (
        "import os, sys; from importlib.abc import MetaPathFinder\n"
        "class Interrupting(MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'typer': os.kill(os.getpid(), {int(with_signal)})\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from omniw4.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), preexec_fn=heed_signals
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted; nothing was written\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    script = (
        "import os, signal, sys; from omniw4.cli import app\n"
        "real = app.run\n"
        "def run(arguments):\n"
        "    for one in (signal.SIGHUP, signal.SIGINT): os.kill(os.getpid(), one)\n"
        "    return real(arguments)\n"
        "app.run = run\n"
        "from omniw4.__main__ import main; sys.argv[1:] = ['--version']; main()"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), preexec_fn=ignore
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("omniw4 ")


def test_a_hang_up_whose_terminal_is_gone_ends_with_130() -> None:
    script = (
        "import os, signal, sys; from omniw4.cli import app, output\n"
        "app.app = lambda *_, **__: os.kill(os.getpid(), signal.SIGHUP)\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)\n"
        "from omniw4.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), preexec_fn=heed_signals
    )
    assert (done.returncode, done.stdout) == (130, "")


def test_ctrl_c_in_calibration_keeps_nothing(qwen3: Path, text: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    command = ("calibrate", qwen3, "--dataset", text, "--out", out, "--samples", 64, "--seq-len", 64)
    partial = out.with_name("stats.partial") / "result"
    code, stderr = stop_when(start(*command), lambda: partial.is_dir() and any(partial.iterdir()), signal.SIGINT)
    assert code == 130, stderr
    assert "error: interrupted; nothing was written" in stderr
    assert list(tmp_path.iterdir()) == []
    run("quantize", qwen3, "--stats", out, "--out", tmp_path / "x").failed(2)


def test_a_killed_calibration_starts_again_by_itself(run: Run, qwen3: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    command = ("calibrate", qwen3, "--dataset", text, "--out", out, *CALIBRATE)
    partial = out.with_name("stats.partial") / "result"
    process = start(*command[:-4], "--samples", 64, "--seq-len", 64)
    code, stderr = stop_when(process, lambda: partial.is_dir() and any(partial.iterdir()), signal.SIGKILL)
    assert code == -signal.SIGKILL, stderr
    assert not out.exists()
    ran = run(*command)
    assert ran.code == 0, ran.stderr
    assert not out.with_name("stats.partial").exists()


def test_calibration_does_not_drop_the_work_of_a_quantization(
    run: Run, qwen3: Path, stats: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ("quantize", qwen3, "--stats", stats, "--out", out, *RANK)
    stop_when(start(*command), lambda: layers_in(out) >= 2, signal.SIGKILL)
    before = layers_in(out)
    assert before >= 2
    run("calibrate", qwen3, "--dataset", text, "--out", out, *CALIBRATE).failed(2, "interrupted run")
    assert layers_in(out) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--set", "recipe.lowrank.rank=4"), "recipe.lowrank.rank: 8 -> 4"),
        (("--config", "seed"), "recipe.rotation"),
        (("--skip", "*.o_proj"), "recipe.skip"),
        (("--max-shard-size", "1MB"), "max_shard_size"),
    ],
)
def test_resume_with_another_recipe_is_refused(
    run: Run, qwen3: Path, stats: Path, interrupted: Callable[[], Path], change: tuple[str, ...], named: str
) -> None:
    out = interrupted()
    before = layers_in(out)
    ran = run("quantize", qwen3, "--stats", stats, "--out", out, *RANK, *change, "--resume")
    ran.failed(2, named, "--overwrite")
    assert layers_in(out) == before


def test_resume_with_another_calibration_is_refused(
    run: Run, qwen3: Path, text: Path, interrupted: Callable[[], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other-stats"
    assert run("calibrate", qwen3, "--dataset", text, "--out", other, *CALIBRATE, "--seed", 5).code == 0
    ran = run("quantize", qwen3, "--stats", other, "--out", interrupted(), *RANK, "--resume")
    ran.failed(2, "calibration.data.tokens_sha256 is another", "calibration.data.seed: 0 -> 5", "--overwrite")
    assert not re.search("[0-9a-f]{20}", ran.stderr), "hashes say nothing to a person"


@pytest.fixture
def interrupted(qwen3: Path, stats: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An output folder whose run stopped after a few linears (in this process, by Ctrl-C)."""
    from omniw4.checkpoint import LayerStore

    real = LayerStore.put

    def make() -> Path:
        def put(self: LayerStore, *arguments: Any) -> None:
            real(self, *arguments)
            if len(self.done()) == 4:
                raise KeyboardInterrupt

        out = tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(LayerStore, "put", put)
            run("quantize", qwen3, "--stats", stats, "--out", out, *RANK).failed(130, "4 of", "--resume")
        return out

    return make


def test_resume_of_nothing_is_an_ordinary_run(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ran = run("quantize", qwen3, "--stats", stats, "--out", out, *RANK, "--resume")
    assert ran.code == 0, ran.stderr
    assert contents(out) == contents(checkpoint)


def test_two_processes_do_not_share_an_output(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("quantize", qwen3, "--stats", stats, "--out", out, *RANK)
    process = start(*command)
    try:
        deadline = time.monotonic() + 60
        while layers_in(out) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        for flags in ((), ("--resume",), ("--overwrite",)):
            run(*command, *flags).failed(2, "another process")
    finally:
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.mark.parametrize("limit", [2_000, 30_000])
def test_disk_full(
    run: Run, run_process: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path, limit: int
) -> None:
    """A limit on the size of files stands for a full disk: small, it stops a layer; larger, the assembled weights."""
    out = tmp_path / "out"
    command = ("quantize", qwen3, "--stats", stats, "--out", out, *RANK)

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ran = run_process(*command, preexec_fn=small_disk)
    ran.failed(2, "cannot write", "\n\nhint: ")
    kept = f"{LINEARS} of {LINEARS} linears are kept in out.partial/: go on with --resume"
    assert (kept in ran.stderr) == (limit == 30_000), ran.stderr
    assert ran.stdout == ""
    refuse_every_reader(run, out, qwen3)
    left = [p for p in tmp_path.rglob("*.tmp")]
    assert left == []
    assert run(*command, "--resume").code == 0
    assert contents(out) == contents(checkpoint)


def test_disk_full_in_calibration(run_process: Run, qwen3: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "stats"

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    ran = run_process("calibrate", qwen3, "--dataset", text, "--out", out, *CALIBRATE, preexec_fn=small_disk)
    ran.failed(2, "cannot write")
    assert list(tmp_path.iterdir()) == []


def test_disk_full_in_repack_leaves_the_checkpoint_usable(
    run: Run, run_process: Run, checkpoint: Path, tmp_path: Path
) -> None:
    import shutil

    copy = shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(".omniw4-cache"))

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    run_process("repack", copy, "--layout", "wgmma_s8", preexec_fn=small_disk).failed(2, "cannot write")
    assert not list(copy.rglob("*.safetensors"))[1:], "only the weights are there"
    assert run("repack", copy, "--layout", "wgmma_s8").code == 0


def test_stdout_on_a_full_disk_is_an_error(checkpoint: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "omniw4", "inspect", str(checkpoint)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: No space left on device")
