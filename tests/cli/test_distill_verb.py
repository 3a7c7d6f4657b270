"""`omniw4 quantize --distill-steps`: trained layers in the checkpoint, texts kept apart, interruption loses nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from harness import Run
from safetensors.torch import save_file
from test_interruption import contents, start, stop_when

SMALL = (
    *("--set", "recipe.lowrank.rank=8", "--set", "recipe.distill.seq_len=32", "--set", "recipe.distill.samples=32"),
    *("--set", "recipe.distill.held_out=4", "--set", "recipe.distill.eval_every=4"),
    *("--set", "recipe.distill.save_every=2", "--set", "recipe.distill.batch_size=2"),
)
TEXT = " ".join(f"the {noun} of number {i} is here." for i in range(400) for noun in ("house", "river", "letter"))


@pytest.fixture(scope="module")
def training_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "training.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def distilled(
    run: Run, qwen3: Path, stats: Path, training_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("distilled") / "out"
    ran = run(*command(qwen3, stats, training_text, out))
    assert ran.code == 0, ran.stderr
    assert "4 held out to choose the best step" in ran.stderr
    assert "held-out KL" in ran.stderr
    return out


def command(qwen3: Path, stats: Path, training_text: Path, out: Path) -> tuple[object, ...]:
    return (
        "quantize",
        qwen3,
        "--stats",
        stats,
        "--out",
        out,
        "--distill-steps",
        "8",
        "--distill-dataset",
        training_text,
        *SMALL,
    )


def test_the_checkpoint_says_what_was_trained_on_what(distilled: Path, checkpoint: Path) -> None:
    manifest = json.loads((distilled / "omniw4.json").read_text())
    data, report = manifest["distillation"]["data"], manifest["distillation"]["report"]
    assert data["dataset"] == "training.txt"
    assert (data["training_sequences"], data["held_out_sequences"]) == (32, 4)
    assert report["kind"] == "logits"
    assert report["steps"] == 8
    assert report["held_out_best"] == min(entry["held_out"] for entry in report["log"])
    assert "seconds" not in json.dumps(report)
    assert manifest["recipe"]["distill"]["steps"] == 8
    assert "distillation" not in json.loads((checkpoint / "omniw4.json").read_text())


def test_codes_stay_and_the_rest_changes(distilled: Path, checkpoint: Path) -> None:
    from omniw4.checkpoint import Checkpoint

    before, after = Checkpoint.open(checkpoint), Checkpoint.open(distilled)
    assert before.specs == after.specs
    changed = set()
    for path in before.specs:
        old, new = before.linear(path).tensors(), after.linear(path).tensors()
        assert old.keys() == new.keys()
        changed |= {name for name, tensor in old.items() if not tensor.equal(new[name])}
    best = json.loads((distilled / "omniw4.json").read_text())["distillation"]["report"]["best_step"]
    assert best > 0
    assert changed in ({"proj_down", "proj_up", "w_scales"}, {"proj_down", "proj_up", "row_scales"})


def test_verify_warns_of_the_text_it_was_trained_on(
    run: Run, distilled: Path, qwen3: Path, training_text: Path
) -> None:
    ran = run("verify", distilled, "--model", qwen3, "--dataset", training_text, "--windows", "2", "--seq-len", "32")
    assert ran.code == 0, ran.stderr
    assert "is the text of the distillation" in ran.stderr


def test_killed_while_distilling_and_resumed(
    run: Run, qwen3: Path, stats: Path, training_text: Path, distilled: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    state = tmp_path / "out.partial" / "distillation.safetensors"
    process = start(*command(qwen3, stats, training_text, out))
    code, stderr = stop_when(process, state.exists, signal.SIGKILL)
    assert code == -signal.SIGKILL, stderr
    assert not out.exists()
    ran = run(*command(qwen3, stats, training_text, out), "--resume")
    assert ran.code == 0, ran.stderr
    assert contents(out) == contents(distilled)


def test_what_is_wrong_is_said_before_anything_is_quantized(
    run: Run, qwen3: Path, stats: Path, training_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    base = ("quantize", qwen3, "--stats", stats, "--out", out)
    run(*base, "--distill-dataset", training_text).failed(2, "nothing is distilled", "--distill-steps")
    run(*base, "--distill-steps", "2", "--distill-dataset", tmp_path / "none.txt").failed(2, "none.txt")
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
    short = tmp_path / "short.txt"
    short.write_text("the house of number one is here. " * 12)
    command = (*base, *SMALL, "--distill-steps", "2", "--distill-dataset")
    run(*command, short, "--set", "recipe.distill.seq_len=200").failed(
        2, "distillation needs at least 2", "--distill-dataset"
    )
    run(*command, training_text, "--set", "recipe.distill.seq_len=300").failed(2, "300 tokens", "256 positions")
    narrow = tmp_path / "narrow.safetensors"
    save_file({"hidden_states": torch.randn(8, 16, 64)}, narrow)
    run(*command, narrow).failed(2, "'narrow.safetensors' have 64 features, those of 'tiny-qwen3' have 128")
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
