"""`omniw4 sweep` measures recipes side by side, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Run

from omniw4.cli.sweep import parse_recipe
from omniw4.errors import StorageError, UsageError

SMALL = ("--windows", 1, "--seq-len", 48, "--no-plots")


def test_recipes_are_compared_and_kept(run: Run, qwen3: Path, stats: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    base = ("sweep", qwen3, "--stats", stats, "--out", out, "--dataset", text, *SMALL)
    ran = run(*base, "--recipe", "rtn", "--recipe", "a8=rtn,recipe.activations.bits=8", "--json")
    assert ran.code == 0, ran.stderr
    told = json.loads(ran.stdout)
    rtn, a8 = told["recipes"]
    assert (rtn["label"], a8["label"]) == ("rtn", "a8")
    assert (rtn["activations"], a8["activations"]) == ("4 bits", "8 bits")
    assert a8["texts"][0]["kl"] < rtn["texts"][0]["kl"]
    assert json.loads((out / "sweep.json").read_text()) == told
    assert sorted(p.name for p in out.iterdir()) == ["sweep.html", "sweep.json", "sweep.md"]
    assert not out.with_name("sweep.partial").exists()

    again = run(*base, "--recipe", "rtn", "--recipe", "rank8=rtn,recipe.lowrank.rank=8")
    assert again.code == 0, again.stderr
    assert "rtn: measured before" in again.stderr
    wide, kept, rank8 = json.loads((out / "sweep.json").read_text())["recipes"]
    assert (wide, kept) == (a8, rtn)  # what was measured before stays in the table
    assert rank8["effective_bits"] < rtn["effective_bits"]

    base = ("sweep", qwen3, "--out", out, "--dataset", text, "--windows", 1, "--no-plots", "--recipe", "rtn")
    run(*base, "--seq-len", 32).failed(2, "holds a comparison", "--overwrite")
    assert len(json.loads((out / "sweep.json").read_text())["recipes"]) == 3
    run("sweep", qwen3, "--out", out, "--recipe", "rtn", "--windows", 1, "--seq-len", 512).failed(2, "positions")

    (out / "notes.txt").write_text("mine")  # the folder is replaced as a whole, so what is in it must be known
    base = ("sweep", qwen3, "--stats", stats, "--out", out, "--dataset", text, *SMALL)
    run(*base, "--recipe", "rtn").failed(2, "notes.txt", "--overwrite")
    assert (out / "notes.txt").read_text() == "mine"


def test_what_is_wrong(run: Run, qwen3: Path, tmp_path: Path) -> None:
    base = ("sweep", qwen3, "--out", tmp_path / "out", *SMALL)
    run(*base, "--recipe", "nope").failed(2, "no config file 'nope'")
    run(*base, "--recipe", "rtn", "--recipe", "rtn").failed(2, "two recipes are called 'rtn'")
    run(*base, "--recipe", "rtn,oops").failed(2, "--recipe wants")
    run(*base, "--recipe", "default").failed(2, "needs calibration statistics", "--stats")
    assert not (tmp_path / "out").exists()


def test_what_is_kept_needs_no_flag(
    run: Run, qwen3: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise StorageError(
            "disk full", hint="free some space; 1 of 9 linears are kept in rtn.partial/: go on with --resume"
        )

    monkeypatch.setattr("omniw4.cli.quantize.command", fail)
    ran = run("sweep", qwen3, "--out", tmp_path / "out", "--dataset", text, *SMALL, "--recipe", "rtn")
    ran.failed(2, "kept in rtn.partial/: go on with the same command")
    assert "--resume" not in ran.stderr


def test_labels() -> None:
    assert parse_recipe("default") == ("default", "default", [])
    assert parse_recipe("my/best.yaml") == ("best", "my/best.yaml", [])
    assert parse_recipe("r=seed,a.b=1,c=2") == ("r", "seed", ["a.b=1", "c=2"])
    for wrong in ("=seed", "a=", "../x=seed", "seed,rank"):
        with pytest.raises(UsageError):
            parse_recipe(wrong)
