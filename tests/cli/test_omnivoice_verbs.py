"""A model that reads no text: calibrated and verified on captured hidden states, through every verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import Run
from safetensors.torch import save_file

from omnivoice_fixture import build

LINEARS = 7 * 2


@pytest.fixture(scope="module")
def omnivoice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("omnivoice") / "model")


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Hidden states as a bidirectional backbone sees them, rows of unequal length: to calibrate, and to judge."""
    files = []
    for seed in (0, 1):
        states = torch.randn(4, 48, 128, generator=torch.Generator().manual_seed(seed))
        mask = torch.arange(48) < torch.tensor([48, 40, 48, 31])[:, None]
        file = tmp_path_factory.mktemp("hidden") / f"{seed}.safetensors"
        save_file({"hidden_states": states, "mask": mask}, file, {"attention": "bidirectional"})
        files.append(file)
    return files


def test_every_verb(run: Run, omnivoice: Path, hidden: list[Path], tmp_path: Path) -> None:
    stats, out = tmp_path / "stats", tmp_path / "out"
    ran = run("calibrate", omnivoice, "--source", hidden[0], "--out", stats, "--json")
    assert ran.code == 0, ran.stderr
    calibrated = json.loads(ran.stdout)
    assert calibrated["linears"] == LINEARS
    assert calibrated["fingerprint"]["data"]["tokens"] == 48 + 40 + 48 + 31, "padding is not counted"

    ran = run("quantize", omnivoice, "--stats", stats, "--out", out, "--json")
    assert ran.code == 0, ran.stderr
    layers = json.loads(ran.stdout)["layers"]
    assert len(layers) == LINEARS
    assert all(layer["path"].startswith("llm.layers.") for layer in layers)

    assert run("repack", out, "--layout", "wgmma_s8").code == 0
    ran = run("verify", out, "--model", omnivoice, "--dataset", hidden[1], "--windows", 3, "--json")
    assert ran.code == 0, ran.stderr
    verdict = json.loads(ran.stdout)
    assert verdict["passed"] is True
    assert verdict["perplexity"]["ratio"] is None, "its heads predict masked codes, not the next token"
    assert 0 <= verdict["kl"] < 1
    assert 0 < verdict["argmax_agreement"] <= 1
    assert run("inspect", out).code == 0


def test_a_data_free_recipe_needs_no_hidden_states(run: Run, omnivoice: Path, tmp_path: Path) -> None:
    ran = run("quantize", omnivoice, "--out", tmp_path / "out", "--config", "rtn", "--json")
    assert ran.code == 0, ran.stderr
    skipped = json.loads(ran.stdout)["skipped"]
    assert not any(path.startswith("llm.") for path in skipped)
    assert "audio_heads" in skipped
