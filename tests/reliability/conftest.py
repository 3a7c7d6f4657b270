"""A tiny model, a text, and what the verbs make of them."""

from __future__ import annotations

import random
from pathlib import Path

import kills
import pytest

from tiny_checkpoint import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(2000)))
    return path


@pytest.fixture(scope="session")
def stats(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stats") / "stats"
    assert kills.run("calibrate", model, "--dataset", text, *kills.CALIBRATE, "--out", out) == 0
    return out


@pytest.fixture(scope="session")
def checkpoint(model: Path, stats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "w4a4"
    assert kills.run("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", out) == 0
    return out
