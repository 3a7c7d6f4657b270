"""The trained OmniVoice through every verb, calibrated and judged on prompts that it decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import Run

from omnivoice_fixture import require_omnivoice
from omniw4.calibrate import Stats
from omniw4.checkpoint import Checkpoint

STEPS = 4
ONE_ROUND = ("--set", "recipe.lowrank.rounds=1")
FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "omnivoice"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files: to calibrate, and to judge."""
    require_omnivoice()
    lines = (FIXTURE / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files = []
    for start, count in ((0, 2), (20, 1)):
        files.append(tmp_path_factory.mktemp("prompts") / f"{start}.jsonl")
        files[-1].write_text("".join(lines[start : start + count]), encoding="utf-8")
    return files


def test_every_verb(run: Run, prompts: list[Path], tmp_path: Path) -> None:
    stats, out = tmp_path / "stats", tmp_path / "out"
    ran = run("calibrate", FIXTURE, "--prompts", prompts[0], "--num-step", STEPS, "--out", stats, "--json")
    assert ran.code == 0, ran.stderr
    data = json.loads(ran.stdout)["fingerprint"]["data"]
    assert (data["prompts"], data["num_step"], data["dataset"]) == (2, STEPS, "0.jsonl")
    assert data["tokens"] == data["tokens_seen"]

    ran = run("quantize", FIXTURE, "--stats", stats, "--out", out, "--config", "omnivoice", *ONE_ROUND, "--json")
    assert ran.code == 0, ran.stderr
    assert len(json.loads(ran.stdout)["layers"]) == 28

    ran = run(
        *("verify", out, "--model", FIXTURE, "--prompts", prompts[1], "--windows", 1, "--min-argmax-agreement", 0.9),
        *("--num-step", STEPS, "--layer-tokens", 16, "--json"),
    )
    assert ran.code == 0, ran.stderr + ran.stdout
    verdict = json.loads(ran.stdout)
    decoding = verdict["decoding"]
    assert decoding["prompts"] == 1
    assert len(decoding["agreement_by_step"]) == STEPS
    assert 0.9 < decoding["agreement"] < 1
    assert 0.5 < decoding["match"] <= 1
    assert (verdict["argmax_agreement"], verdict["kl"]) == (decoding["agreement"], decoding["kl"])
    assert verdict["windows"]["dataset"] == "20.jsonl"
    assert verdict["hidden_error"] < 0.2


def test_prompts_through_a_checkpoint(run: Run, prompts: list[Path], tmp_path: Path) -> None:
    """The original decodes, so that what enters the first block is the same; the rest is as the checkpoint has it."""
    out = tmp_path / "rtn"
    ran = run("quantize", FIXTURE, "--config", "rtn", "--out", out)
    assert ran.code == 0, ran.stderr
    command = ("calibrate", FIXTURE, "--prompts", prompts[1], "--num-step", STEPS)
    for name, flags in (("plain", ()), ("through", ("--through", out))):
        ran = run(*command, *flags, "--out", tmp_path / name)
        assert ran.code == 0, ran.stderr
    plain, through = Stats.open(tmp_path / "plain"), Stats.open(tmp_path / "through")
    assert through.fingerprint["through"]["checkpoint"] == Checkpoint.open(out).hash
    assert {key: value for key, value in through.fingerprint.items() if key != "through"} == plain.fingerprint
    changed = {n for n in plain.groups if not torch.equal(plain.linear(n).hessian, through.linear(n).hessian)}
    assert changed == set(plain.groups) - {"llm.layers.0.self_attn.q_proj"}


def test_what_does_not_go_together_is_refused(run: Run, prompts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for flags, said in (
        (("--dataset", "x.txt"), "--dataset and --prompts exclude each other"),
        (("--source", "x.safetensors"), "--source and --prompts exclude each other"),
        (("--offload",), "--prompts and --offload exclude each other"),
    ):
        ran = run("calibrate", FIXTURE, "--prompts", prompts[0], *flags, "--out", out)
        assert ran.code == 2
        assert said in ran.stderr
    ran = run("calibrate", FIXTURE, "--prompts", tmp_path / "none.jsonl", "--out", out)
    assert ran.code == 2
    assert "cannot be read" in ran.stderr
