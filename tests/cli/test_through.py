"""``calibrate --through``: statistics of inputs as a checkpoint's linears make them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CALIBRATE, Run, save_model

from omniw4.calibrate import Stats
from omniw4.checkpoint import Checkpoint
from omniw4.cli.calibrate import _standing_in
from omniw4.errors import UsageError
from omniw4.model import LoadedModel


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def passed(run: Run, qwen3: Path, text: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the same text, through the fixture's checkpoint."""
    out = tmp_path_factory.mktemp("through") / "stats"
    ran = run("calibrate", qwen3, "--dataset", text, "--through", checkpoint, "--out", out, *CALIBRATE)
    assert ran.code == 0, ran.stderr
    assert "through the linears of w4a4" in ran.stderr
    return out


def test_only_what_enters_the_first_block_is_as_before(stats: Path, passed: Path) -> None:
    plain, found = Stats.open(stats), Stats.open(passed)
    hashes = [{name: group.pop("sha256") for name, group in one.groups.items()} for one in (plain, found)]
    assert found.groups == plain.groups
    for name in plain.groups:
        a, b = plain.linear(name), found.linear(name)
        same = torch.equal(a.hessian, b.hessian) and torch.equal(a.absmax, b.absmax)
        assert same is (name == "model.layers.0.self_attn.q_proj"), name
        assert same is (hashes[0][name] == hashes[1][name]), name


def test_the_fingerprint_says_through_what(stats: Path, passed: Path, checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    found = Stats.open(passed).fingerprint
    assert found.pop("through") == {"checkpoint": opened.hash, "recipe": opened.recipe}
    assert found == Stats.open(stats).fingerprint


@pytest.mark.parametrize("flags", [(), ("--offload",)], ids=str)
def test_the_same_bytes_again(
    run: Run, qwen3: Path, text: Path, checkpoint: Path, passed: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    elsewhere = shutil.copytree(checkpoint, tmp_path / "renamed")
    command = ("calibrate", qwen3, "--dataset", text, "--through", elsewhere, *CALIBRATE, *flags)
    ran = run(*command, "--out", tmp_path / "stats")
    assert ran.code == 0, ran.stderr
    assert contents(tmp_path / "stats") == contents(passed)


def test_a_second_checkpoint_tells_its_origin(
    run: Run, qwen3: Path, stats: Path, passed: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Quantized with the new statistics: provenance, report and inspect name the checkpoint they went through, and
    an interrupted run is not gone on with on other statistics."""
    out, told = tmp_path / "second", f"through checkpoint {Checkpoint.open(checkpoint).hash[:16]}"
    command = ("quantize", qwen3, "--out", out, "--set", "recipe.lowrank.rank=8", "--set", "recipe.lowrank.rounds=1")
    ran = run(*command, "--stats", passed)
    assert ran.code == 0, ran.stderr
    assert Checkpoint.open(out).provenance["calibration"] == Stats.open(passed).fingerprint
    assert told in run("inspect", out).stdout
    assert told not in run("inspect", checkpoint).stdout
    assert run("report", out).code == 0
    assert told in (out / "report" / "report.md").read_text(encoding="utf-8")

    partial = out.with_name("second.partial")  # what a run with these statistics leaves when it is killed
    (partial / "layers").mkdir(parents=True)
    started = {"verb": "quantize", "calibration": Stats.open(passed).fingerprint}
    (partial / "fingerprint.json").write_text(json.dumps(started), encoding="utf-8")
    shutil.rmtree(out)
    run(*command, "--stats", stats, "--resume").failed(2, "calibration.through: some -> none")


def test_captured_hidden_states_pass_through(run: Run, qwen3: Path, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    source = tmp_path / "hidden.safetensors"
    save_file({"hidden_states": torch.randn(3, 32, 128, generator=generator)}, source)
    ran = run("calibrate", qwen3, "--source", source, "--through", checkpoint, "--out", tmp_path / "stats", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["fingerprint"]["through"]["checkpoint"] == Checkpoint.open(checkpoint).hash


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_is_refused(run: Run, qwen3: Path, llama: Path, text: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "finetuned", seed=1)
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    flip_a_bit(next(damaged.glob("*.safetensors")))
    cases: list[tuple[Path, Path, tuple[str, ...]]] = [
        (other, checkpoint, ("--through 'w4a4': the checkpoint was made from 'tiny-qwen3'", "'finetuned'")),
        (llama, checkpoint, ("--through 'w4a4'", "'tiny-llama'")),
        (
            qwen3,
            qwen3,
            (
                "--through 'tiny-qwen3' is no checkpoint of omniw4: config.json has no quantization_config",
                "omniw4 quantize",
            ),
        ),
        (qwen3, tmp_path / "nothing", ("nothing",)),
        (qwen3, damaged, (".safetensors",)),
    ]
    for model, through, words in cases:
        out = tmp_path / "out"
        ran = run("calibrate", model, "--dataset", text, "--through", through, "--out", out, *CALIBRATE)
        ran.failed(2, *words, "\n\nhint: ")
        assert not list(tmp_path.glob("out*")), "a refused command left something behind"


@pytest.mark.parametrize(("dtype", "device", "fine"), [
    (torch.float32, "cpu", True), (torch.float32, "cuda:0", False), (torch.bfloat16, "cuda:0", True)
])  # fmt: skip
def test_a_gpu_takes_16_bits(checkpoint: Path, dtype: torch.dtype, device: str, fine: bool) -> None:
    """Decided before anything runs, so that it is tested without a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**config, num_attention_heads=1, num_key_value_heads=1)).to(dtype)
    loaded, opened = LoadedModel(model, None, "tiny", ""), Checkpoint.open(checkpoint)
    if fine:
        assert callable(_standing_in(loaded, opened, None, device))
    else:
        with pytest.raises(UsageError, match="take 16 bits there, and the model is in float32"):
            _standing_in(loaded, opened, None, device)
