"""`omniw4 sensitivity` writes a recipe that `omniw4 quantize` takes."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from harness import Run, save_model

SMALL = ("--windows", 1, "--seq-len", 48)


def test_from_gains_to_a_mixed_checkpoint(
    run: Run, checkpoint: Path, qwen3: Path, stats: Path, text: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed.yaml"
    ran = run("sensitivity", checkpoint, "--model", qwen3, "--out", mixed, "--json", *SMALL)
    assert ran.code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["all_at_8"] < told["baseline"]
    assert len(told["gains"]) == 21
    assert 1 <= len(told["chosen"]) <= 5
    assert [o["pattern"] for o in yaml.safe_load(mixed.read_text())["recipe"]["overrides"]] == told["chosen"]
    out = tmp_path / "out"
    ran = run("quantize", qwen3, "--stats", stats, "--config", mixed, "--out", out)
    assert ran.code == 0, ran.stderr
    from omniw4.checkpoint import Checkpoint

    specs = Checkpoint.open(out).specs
    assert sorted(path for path, spec in specs.items() if spec.act_bits == 8) == sorted(told["chosen"])
    assert {spec.act_clip for spec in specs.values() if spec.act_bits == 8} == {1.0}


def test_user_errors(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.yaml"
    there.touch()
    base = ("sensitivity", checkpoint, "--model", qwen3, *SMALL)
    run(*base, "--by", "luck").failed(2, "--by is 'luck'", "count or weights")
    run(*base, "--out", there).failed(2, "exists", "another name")
    run("sensitivity", tmp_path / "none", "--model", qwen3).failed(2, "hint")


def test_another_model_is_refused_or_warned_of(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "wide", hidden_size=192)
    run("sensitivity", checkpoint, "--model", other, *SMALL).failed(2, "in the checkpoint it is", "--model")
    run("verify", checkpoint, "--model", other, *SMALL).failed(2, "in the checkpoint it is", "--model")
    same_shapes = save_model(tmp_path / "seed", seed=1)
    ran = run("sensitivity", checkpoint, "--model", same_shapes, *SMALL)
    assert ran.code == 0, ran.stderr
    assert "with other files than" in ran.stderr
