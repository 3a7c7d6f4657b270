"""Tiny models on disk, a text, and the command line as a user runs it."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import CALIBRATE, Ran, Run, environment, save_model


@pytest.fixture(scope="session")
def run() -> Run:
    """The command line in this process: exit code and both streams (torch is imported once)."""

    def go(*arguments: Any) -> Ran:
        from omniw4.cli import app

        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = app.run([str(a) for a in arguments])
        return Ran(code, stdout.getvalue(), stderr.getvalue())

    return go


@pytest.fixture(scope="session")
def run_process() -> Run:
    """The command line as a process of its own."""

    def go(*arguments: Any, **keywords: Any) -> Ran:
        command = [sys.executable, "-m", "omniw4", *map(str, arguments)]
        variables = keywords.pop("env", {})
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment(**variables), **keywords
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return go


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of words and numbers, enough for some thousand tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(600)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=6000)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", "llama", attention_bias=True, tie_word_embeddings=False
    )


@pytest.fixture(scope="session")
def stats(run: Run, qwen3: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats"
    ran = run("calibrate", qwen3, "--dataset", text, "--out", out, *CALIBRATE)
    assert ran.code == 0, ran.stderr
    return out


@pytest.fixture(scope="session")
def checkpoint(run: Run, qwen3: Path, stats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 quantized by the default recipe, at rank 8; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("checkpoint") / "w4a4"
    ran = run("quantize", qwen3, "--stats", stats, "--out", out, "--set", "recipe.lowrank.rank=8")
    assert ran.code == 0, ran.stderr
    return out
