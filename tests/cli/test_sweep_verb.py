"""`omniw4 sweep` measures recipes side by side, from several calibrations, and goes on where it stopped."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import CALIBRATE, Run

from omnivoice_fixture import require_omnivoice
from omniw4.bench import speed
from omniw4.bench.timing import Timing
from omniw4.cli.output import Output
from omniw4.cli.sweep import parse_recipe
from omniw4.cli.sweep_runs import Candidate, Judge
from omniw4.errors import ModelError, StorageError, UsageError

SMALL = ("--windows", 1, "--seq-len", 48, "--no-plots")
QUICK = "quick=default,recipe.lowrank.rounds=1,recipe.gptq.sweeps=0"
FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "omnivoice"


@pytest.fixture(scope="module")
def other(run: Run, qwen3: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of another seed than ``stats``."""
    out = tmp_path_factory.mktemp("stats") / "other"
    ran = run("calibrate", qwen3, "--dataset", text, "--out", out, *CALIBRATE, "--seed", 1)
    assert ran.code == 0, ran.stderr
    return out


@dataclass
class Measured:
    """What is measured in place of real runs: ratios by recipe and calibration."""

    names: list[str] = field(default_factory=list)
    broken: str = ""  # name of a run that fails
    error: BaseException = field(default_factory=lambda: ModelError("it is broken"))

    def __call__(self, candidate: Candidate, stats: Path | None, checkpoint: Path, output: Output) -> dict[str, Any]:
        name = candidate.named(stats)
        if name == self.broken:
            raise self.error
        self.names.append(name)
        ratio = 1.2 + 0.1 * ("other" in name) + candidate.recipe.lowrank.rank / 100
        text = {"perplexity": {"ratio": ratio}, "kl": 0.1, "argmax_agreement": 0.9, "path": "reference"}
        return {"activations": "4 bits", "seconds": 1.0, "distilled": 0, "texts": [text], "effective_bits": 4.5}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    monkeypatch.setattr(Judge, "measure", lambda self, *arguments: found(*arguments))
    return found


@pytest.fixture
def sweep(run: Run, qwen3: Path, text: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run it on the tiny model and the text: label -> row."""

    def go(*arguments: Any) -> dict[str, dict[str, Any]]:
        ran = run("sweep", qwen3, "--dataset", text, *SMALL, *arguments, "--json")
        assert ran.code == 0, ran.stderr
        return {row["label"]: row for row in json.loads(ran.stdout)["recipes"]}

    return go


def test_recipes_are_compared_and_kept(run: Run, qwen3: Path, stats: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    base = ("sweep", qwen3, "--stats", stats, "--out", out, "--dataset", text, *SMALL)
    ran = run(*base, "--recipe", "rtn", "--recipe", "a8=rtn,recipe.activations.bits=8", "--json")
    assert ran.code == 0, ran.stderr
    told = json.loads(ran.stdout)
    rtn, a8 = told["recipes"]
    assert (rtn["label"], a8["label"], told["baseline"]) == ("rtn", "a8", "rtn")
    assert (rtn["activations"], a8["activations"]) == ("4 bits", "8 bits")
    assert a8["texts"][0]["kl"] < rtn["texts"][0]["kl"]
    assert a8["difference"] == a8["score"] - rtn["score"]
    assert (rtn["backbone_ms"], rtn["std"]) == (None, None)
    assert json.loads((out / "sweep.json").read_text()) == told
    assert sorted(p.name for p in out.iterdir()) == ["sweep.html", "sweep.json", "sweep.md"]
    assert not out.with_name("sweep.partial").exists()

    again = run(*base, "--recipe", "rtn", "--recipe", "rank8=rtn,recipe.lowrank.rank=8")
    assert again.code == 0, again.stderr
    assert "rtn: measured before" in again.stderr
    kept, wide, rank8 = json.loads((out / "sweep.json").read_text())["recipes"]
    assert (kept, wide) == (rtn, a8)  # what was measured before stays in the table
    assert rank8["effective_bits"] < rtn["effective_bits"]

    base = ("sweep", qwen3, "--out", out, "--dataset", text, "--windows", 1, "--no-plots", "--recipe", "rtn")
    run(*base, "--seq-len", 32).failed(2, "holds a comparison", "--overwrite")
    assert len(json.loads((out / "sweep.json").read_text())["recipes"]) == 3
    run("sweep", qwen3, "--out", out, "--recipe", "rtn", "--windows", 1, "--seq-len", 512).failed(2, "positions")

    (out / "notes.txt").write_text("mine")  # the folder is replaced as a whole, so what is in it must be known
    base = ("sweep", qwen3, "--stats", stats, "--out", out, "--dataset", text, *SMALL)
    run(*base, "--recipe", "rtn").failed(2, "notes.txt", "--overwrite")
    assert (out / "notes.txt").read_text() == "mine"


def test_each_recipe_is_judged_once_from_each_calibration(
    sweep: Callable[..., Any], stats: Path, other: Path, tmp_path: Path
) -> None:
    found = sweep("--out", tmp_path / "out", "--stats", stats, "--stats", other, "--recipe", QUICK, "--recipe", "rtn")
    quick, rtn = found["quick"], found["rtn"]
    assert [run["fingerprint"]["stats"]["data"]["seed"] for run in quick["runs"]] == [0, 1]
    assert [run["fingerprint"]["stats"] for run in rtn["runs"]] == [None], "data-free recipes run once"
    kls = [run["texts"][0]["kl"] for run in quick["runs"]]
    assert kls[0] != kls[1]
    assert quick["texts"][0]["kl"] == statistics.fmean(kls)
    assert quick["std"]["texts"][0]["kl"] == statistics.stdev(kls)
    assert isinstance(rtn["beyond"], bool), "the baseline has a spread"
    assert "±" in (tmp_path / "out" / "sweep.md").read_text()


def test_it_goes_on_by_recipe_and_calibration(
    run: Run, sweep: Callable[..., Any], measured: Measured, qwen3: Path, text: Path, stats: Path, other: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    both = ("--stats", stats, "--stats", other, "--recipe", "default", "--recipe", "rtn", "--out", out)
    measured.broken = "default from other"
    run("sweep", qwen3, "--dataset", text, *SMALL, *both).failed(2, "is broken")
    measured.error = KeyboardInterrupt()
    ran = run("sweep", qwen3, "--dataset", text, *SMALL, *both)
    assert (ran.code, out.exists()) == (130, False)
    assert "kept: 1 measured run" in ran.stderr
    assert "run the same command again" in ran.stderr
    measured.broken = ""
    sweep(*both)
    assert measured.names == ["default from stats", "default from other", "rtn"]

    found = sweep("--stats", other, "--recipe", "default", "--recipe", "w4a8", "--out", out)
    assert measured.names[3:] == ["w4a8 from other"]
    assert [len(row["runs"]) for row in found.values()] == [2, 1, 1]
    found = sweep("--stats", other, "--recipe", "default=default,recipe.lowrank.rank=8", "--out", out)
    assert measured.names[4:] == ["default from other"]
    assert len(found["default"]["runs"]) == 1, "runs of another recipe by this name are not averaged with it"
    assert found["default"]["score"] == pytest.approx(1.38)


def earlier_form(out: Path) -> None:
    """Rewrite results as they were when there was one calibration alone: a row a run, every row with its statistics."""
    document = json.loads((out / "sweep.json").read_text())
    rows = [run for row in document["recipes"] for run in row["runs"]]
    for row in rows:
        row["fingerprint"]["stats"] = rows[0]["fingerprint"]["stats"]
        recipe = json.loads(row["key"])
        del recipe["distill"]["seed"]  # keys have been added to recipes since
        row["key"] = json.dumps(recipe, sort_keys=True)
    del document["baseline"]
    (out / "sweep.json").write_text(json.dumps({**document, "recipes": rows}))


def test_results_of_the_earlier_form_are_gone_on_with_and_merged(
    sweep: Callable[..., Any], measured: Measured, stats: Path, other: Path, tmp_path: Path
) -> None:
    recipes = ("--recipe", "default", "--recipe", "rtn")
    for name, folder in (("a", stats), ("b", other)):
        sweep("--out", tmp_path / name, "--stats", folder, *recipes)
        earlier_form(tmp_path / name)
    before = (tmp_path / "b" / "sweep.json").read_bytes()
    measured.names.clear()
    sweep("--out", tmp_path / "a", "--stats", stats, *recipes)
    found = sweep("--merge", tmp_path / "a", "--merge", tmp_path / "b", "--out", tmp_path / "both")
    assert measured.names == []
    assert [(label, len(row["runs"])) for label, row in found.items()] == [("default", 2), ("rtn", 1)]
    assert found["default"]["score"] == pytest.approx(statistics.fmean((1.36, 1.46)))
    assert (tmp_path / "b" / "sweep.json").read_bytes() == before
    found = sweep("--out", tmp_path / "a", "--merge", tmp_path / "b", "--stats", stats, "--recipe", "w4a8")
    assert measured.names == ["w4a8 from stats"]
    assert [len(row["runs"]) for row in found.values()] == [2, 1, 1]


def test_what_cannot_be_merged(
    run: Run, sweep: Callable[..., Any], measured: Measured, qwen3: Path, text: Path, stats: Path, tmp_path: Path
) -> None:
    sweep("--out", tmp_path / "a", "--stats", stats, "--recipe", "r=default")
    base = ("sweep", qwen3, "--merge", tmp_path / "a", "--out", tmp_path / "out")
    other = ("--dataset", text, "--windows", 2, "--seq-len", 48)
    run(*base, *other).failed(2, "another comparison", "windows: 1 -> 2")
    wanted = ("--dataset", text, *SMALL)
    run(*base, *wanted, "--recipe", "r=rtn").failed(2, "another recipe 'r'", "LABEL=")
    run(*base, *wanted, "--merge", tmp_path / "none").failed(2, "no readable sweep.json")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "sweep.json").write_text('{"recipes":' + "[" * 200_000)
    run(*base, *wanted, "--merge", tmp_path / "deep").failed(2, "no readable sweep.json")
    run(*base, *wanted, "--baseline", "x").failed(2, "'x' is no recipe", "it has r")
    assert not (tmp_path / "out").exists()


def test_what_is_wrong(run: Run, qwen3: Path, llama: Path, stats: Path, tmp_path: Path) -> None:
    base = ("sweep", qwen3, "--out", tmp_path / "out", *SMALL)
    run(*base, "--recipe", "nope").failed(2, "no config file 'nope'")
    run(*base, "--recipe", "rtn", "--recipe", "rtn").failed(2, "two recipes are called 'rtn'")
    run(*base, "--recipe", "rtn,oops").failed(2, "--recipe wants")
    run(*base, "--recipe", "default").failed(2, "needs calibration statistics", "--stats")
    run(*base).failed(2, "nothing to compare", "--recipe")
    same = tmp_path / "same"
    shutil.copytree(stats, same)
    run(*base, "--recipe", "default", "--stats", stats, "--stats", same).failed(2, "the same calibration", "--seed")
    run("sweep", llama, *base[2:], "--recipe", "rtn", "--stats", stats).failed(2, "another model")
    require_omnivoice()
    spoken = ("--prompts", FIXTURE / "prompts.jsonl")
    run(*base, "--recipe", "rtn", *spoken).failed(2, "prompts are for an OmniVoice", "--dataset")
    run(*base, "--recipe", "rtn", *spoken, "--dataset", "x.txt").failed(2, "exclude each other")
    assert not (tmp_path / "out").exists()


def test_an_omnivoice_is_judged_on_prompts(run: Run, tmp_path: Path) -> None:
    require_omnivoice()
    lines = (FIXTURE / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "said.jsonl").write_text(lines[20], encoding="utf-8")
    base = ("sweep", FIXTURE, "--prompts", tmp_path / "said.jsonl", "--recipe", "rtn", "--no-plots")
    ran = run(*base, "--num-step", 4, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.stderr
    told = json.loads(ran.stdout)
    (row,) = told["recipes"]
    assert 0.8 < row["texts"][0]["argmax_agreement"] < 1
    assert 0.3 < row["texts"][0]["match"] < 1
    assert row["score"] == row["texts"][0]["kl"] > 0
    assert (told["datasets"], told["prompts"]["count"], told["prompts"]["num_step"]) == (["said.jsonl"], 1, 4)
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert "| step agreement | final match | KL |" in page
    run(*base, "--num-step", 8, "--out", tmp_path / "out").failed(2, "holds a comparison")


def test_the_engines_speed_is_in_the_row(
    run: Run, qwen3: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def milliseconds(checkpoint: Path, device: str) -> float:
        assert (checkpoint / "omniw4.json").is_file()
        if json.loads((checkpoint / "omniw4.json").read_text())["recipe"]["lowrank"]["rank"] == 8:
            raise ModelError("not this one")
        return 1.5

    monkeypatch.setattr(speed, "backbone_milliseconds", milliseconds)
    recipes = ("--recipe", "rtn", "--recipe", "r8=rtn,recipe.lowrank.rank=8")
    ran = run("sweep", qwen3, "--dataset", text, *SMALL, *recipes, "--out", tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert "r8: no speed, the engine does not run it: not this one" in ran.stderr
    assert "ms a forward" in ran.stdout
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())["recipes"]
    assert [row["backbone_ms"] for row in rows] == [1.5, None]


def test_the_speed_is_of_the_engine_on_the_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.backbone_milliseconds(checkpoint, "cpu") is None, "no number where there are no kernels"

    def measure(calls: Any, device: Any, **settings: Any) -> Timing:
        assert calls[0]().shape == (128, 128)  # [P, H]
        return Timing((1000.0, 1500.0, 4000.0))

    monkeypatch.setattr(speed, "kernel_layout", lambda device, act_bits, scale_type: "wgmma_s8")
    monkeypatch.setattr(speed, "measure_eager", measure)
    assert speed.backbone_milliseconds(checkpoint, "cpu", tokens=128) == 1.5
    with pytest.raises(ModelError, match="256 positions, wanted 1024"):
        speed.backbone_milliseconds(checkpoint, "cpu", tokens=2048)


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
