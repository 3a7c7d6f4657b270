"""kill -9 at random instants of a verb, and what must hold afterwards.

A verb runs in a process forked from one that has imported everything already, so a trial costs its work alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from killing import folder_bytes
from omniw4.checkpoint import Checkpoint
from omniw4.errors import OmniW4Error

CALIBRATE = ("--samples", 6, "--seq-len", 64)
DISTIL = (
    *("--distill-steps", 6, "--set", "recipe.distill.seq_len=64", "--set", "recipe.distill.samples=4"),
    *("--set", "recipe.distill.held_out=2", "--set", "recipe.distill.eval_every=2"),
    *("--set", "recipe.distill.save_every=2"),
)
GENERATE = ("--samples", 4, "--seq-len", 64)
OWN, OWN_LOCK = "own.jsonl", ".own.jsonl.lock.omniw4-tmp"
QUANTIZE = ("--set", "recipe.lowrank.rank=8", "--max-shard-size", "40KB")


def start(
    *arguments: Any, stderr: Path | None = None, user: int | None = None, environment: dict[str, str] | None = None
) -> int:
    """Run the command line in a forked process with the handlers it has as a program; returns its id.

    Args:
        stderr: a file for what it says there; this process's own without one, so that a failed test shows it.
        user: becomes this user first, when it is root.
        environment: variables it has in addition.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        from omniw4.cli import app

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if stderr is not None:
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(environment or {})
        if user is not None and os.geteuid() == 0:
            os.setuid(user)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a fresh interpreter
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        app.main([str(a) for a in arguments])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 98
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int:
    """Exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(*arguments: Any) -> int:
    return wait(start(*arguments))


def run_and_kill(delay: float, *arguments: Any) -> int:
    child = start(*arguments, stderr=Path(os.devnull))
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return wait(child)


@dataclass(frozen=True)
class Verb:
    """How a verb is run, started again after a kill, and what its output is.

    Attributes:
        first, again: its arguments, given the output folder.
        prepare: makes what must be there before, in the output folder.
        result: the bytes of what it makes, given the output folder; empty when there is nothing.
    """

    name: str
    first: Callable[[Path], tuple[Any, ...]]
    again: Callable[[Path], tuple[Any, ...]]
    prepare: Callable[[Path], Any]
    result: Callable[[Path], dict[str, bytes]]


@dataclass
class Tally:
    """What a series of kills came upon."""

    trials: int = 0
    killed: int = 0
    finished: int = 0  # the verb was faster than the kill
    kept_old: int = 0
    had_new: int = 0
    resumed: int = 0  # work of the killed run was there to go on with


def verbs(model: Path, text: Path, stats: Path, checkpoint: Path) -> list[Verb]:
    """calibrate, quantize, quantize over an older output and with distillation, export, generate, repack."""
    calibrate = ("calibrate", model, "--dataset", text, *CALIBRATE)
    quantize = ("quantize", model, "--stats", stats, *QUANTIZE)

    generate = ("generate", model, *GENERATE)

    distil = (*quantize, "--distill-dataset", text, *DISTIL)

    def nothing(out: Path) -> None:
        return None

    def copy(out: Path) -> None:
        shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns(".omniw4-cache"))

    def older(out: Path) -> None:
        assert run("quantize", model, "--config", "rtn", "--out", out) == 0

    def older_text(out: Path) -> None:
        out.mkdir()
        (out / OWN).write_text("years of work")

    def cache(out: Path) -> dict[str, bytes]:
        return {name: data for name, data in folder_bytes(out).items() if name.endswith(".safetensors")}

    return [
        Verb("calibrate", *(2 * [lambda out: (*calibrate, "--out", out)]), nothing, folder_or_nothing),
        Verb(
            "quantize",
            lambda out: (*quantize, "--out", out),
            lambda out: (*quantize, "--out", out, "--resume"),
            nothing,
            folder_or_nothing,
        ),
        Verb(
            "quantize --overwrite",
            lambda out: (*quantize, "--out", out, "--overwrite"),
            lambda out: (*quantize, "--out", out, "--overwrite", "--resume"),
            older,
            folder_or_nothing,
        ),
        Verb(
            "quantize --distill-steps",
            lambda out: (*distil, "--out", out),
            lambda out: (*distil, "--out", out, "--resume"),
            nothing,
            folder_or_nothing,
        ),
        Verb(
            "export",
            *(2 * [lambda out: ("export", checkpoint, "--dequantize", "--out", out)]),
            nothing,
            folder_or_nothing,
        ),
        Verb("generate", *(2 * [lambda out: (*generate, "--out", out / OWN)]), Path.mkdir, own_text),
        Verb(
            "generate --overwrite",
            *(2 * [lambda out: (*generate, "--out", out / OWN, "--overwrite")]),
            older_text,
            own_text,
        ),
        Verb("repack", *(2 * [lambda out: ("repack", out, "--layout", "wgmma_s8")]), copy, cache),
    ]


def folder_or_nothing(out: Path) -> dict[str, bytes]:
    return folder_bytes(out) if out.exists() else {}


def own_text(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in folder_bytes(out).items() if name == OWN}


def kill_often(verb: Verb, scratch: Path, trials: int, seed: int) -> Tally:
    """Kill a verb at uniformly random instants of its run; each time go on until it is through.

    After a kill the output is what it was before, or the finished one. A run that is started again, and perhaps killed
    again, ends with the bytes of an uninterrupted run, and nothing but the output is left.

    Raises:
        AssertionError: naming seed and trial.
    """
    rng = random.Random(f"{verb.name} {seed}")
    scratch.mkdir(parents=True)
    whole = scratch / "whole" / "out"
    whole.parent.mkdir()
    verb.prepare(whole)
    old = verb.result(whole)
    began = time.monotonic()
    assert run(*verb.first(whole)) == 0, f"{verb.name} fails even when nobody kills it"
    seconds = time.monotonic() - began
    new = verb.result(whole)
    assert new != old
    everything = folder_bytes(whole.parent)
    tally = Tally()
    for trial in range(trials):
        case = f"{verb.name}, seed {seed}, trial {trial}"
        out = scratch / str(trial) / "out"
        out.parent.mkdir()
        verb.prepare(out)
        code = run_and_kill(rng.uniform(0, seconds), *verb.first(out))
        _count(tally, code, verb.result(out), old, new, case)
        while code != 0:
            partial = out.with_name("out.partial")
            tally.resumed += partial.is_dir() and any(partial.glob("layers/*"))
            _refuse_leftovers(partial, case)
            if verb.result(out) == new and old != new and verb.name != "repack":
                break  # killed after its last step: there is nothing to do again
            again = rng.random() < 0.3
            code = run_and_kill(rng.uniform(0, seconds), *verb.again(out)) if again else run(*verb.again(out))
            assert code in (0, -signal.SIGKILL), f"{case}: started again, it ends with {code}"
            assert verb.result(out) in (old, new), f"{case}: killed again, neither old nor new"
        left = {
            name: data
            for name, data in folder_bytes(out.parent).items()
            if "out.partial" not in name and not name.endswith(OWN_LOCK)  # killed after its last step
        }
        assert left == everything, f"{case}: other bytes than without a kill"
        shutil.rmtree(out.parent)
    return tally


def _count(
    tally: Tally, code: int, found: dict[str, bytes], old: dict[str, bytes], new: dict[str, bytes], case: str
) -> None:
    assert code in (0, -signal.SIGKILL), f"{case}: ends with {code}"
    assert found in (old, new), f"{case}: neither the old output nor the new one: {sorted(found)}"
    tally.trials += 1
    tally.killed += code != 0
    tally.finished += code == 0
    tally.kept_old += found == old
    tally.had_new += found == new


def _refuse_leftovers(partial: Path, case: str) -> None:
    """What an interrupted run leaves passes for no checkpoint."""
    for folder in (partial, partial / "result"):
        with contextlib.suppress(OmniW4Error):
            checkpoint = Checkpoint.open(folder)
            checkpoint.check_hashes()  # whole, and only its last rename is missing
            assert folder.name == "result", f"{case}: {folder} passes for a checkpoint"
