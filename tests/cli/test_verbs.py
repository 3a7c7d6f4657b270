"""All verbs, one after the other, on tiny random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CALIBRATE, HIDDEN, LAYERS, Run

from omniw4 import config
from omniw4.cli import settings

LINEARS = 7 * LAYERS
SHORT_DISTILLATION = [
    f"recipe.distill.{key}"
    for key in ("steps=2", "seq_len=64", "samples=8", "held_out=2", "batch_size=2", "micro_batch=2", "eval_every=1")
]


def document(run: Run, *arguments: Any, code: int = 0) -> Any:
    """The JSON a verb prints; it must be all that it prints."""
    ran = run(*arguments, "--json")
    assert ran.code == code, ran.stderr
    assert code or ran.stderr == ""
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_from_model_to_verdict(run: Run, name: str, text: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(name)
    stats, out = tmp_path / "stats", tmp_path / "out"
    calibrated = document(run, "calibrate", model, "--dataset", text, "--out", stats, *CALIBRATE)
    assert calibrated["linears"] == LINEARS
    assert calibrated["groups"] == 4 * LAYERS, "q, k, v share an input; gate, up share one"
    assert calibrated["fingerprint"]["data"]["tokens"] == 4 * 64

    quantized = document(run, "quantize", model, "--stats", stats, "--out", out)
    assert quantized["linears"] == LINEARS
    assert [layer["method"] for layer in quantized["layers"]] == ["gptq"] * LINEARS

    packed = document(run, "repack", out)
    assert packed["linears"] == LINEARS
    assert Path(packed["file"]).is_file()

    held_out = ["--windows", 2, "--seq-len", 64, "--max-kl", 1, "--max-perplexity-ratio", 2]
    verdict = document(run, "verify", out, "--model", model, *held_out)
    assert verdict["passed"] is True
    assert len(verdict["layers"]) == LINEARS
    assert verdict["perplexity"]["ratio"] == pytest.approx(
        verdict["perplexity"]["quantized"] / verdict["perplexity"]["reference"]
    )
    assert 0 <= verdict["kl"] < 1
    assert 0 < verdict["argmax_agreement"] <= 1
    assert verdict["path"] == "reference"
    assert {"max_kl", "max_perplexity_ratio", "structure", "repack_identity"} <= {g["name"] for g in verdict["gates"]}

    timed = document(
        run, "bench", out, "--model", model, "--shapes", f"3x64x{HIDDEN}", "--prefill", "1x8", "--repetitions", 2
    )
    assert timed["passed"] is True
    assert timed["environment"]["repetitions"] == 2
    assert any("CPU" in note for note in timed["notes"])

    inspected = document(run, "inspect", out)
    assert inspected["hash"] == quantized["hash"]
    assert len(inspected["layers"]) == LINEARS


def test_the_stored_recipe_runs_again_as_it_is(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = document(run, "inspect", checkpoint)["recipe"]
    again = tmp_path / "recipe.yaml"
    again.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    out = tmp_path / "out"
    document(run, "quantize", qwen3, "--stats", stats, "--out", out, "--config", again)
    assert snapshot(out) == snapshot(checkpoint)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("name", sorted(p.stem for p in config.config_dir().glob("*.yaml")))
def test_every_shipped_config_quantizes(run: Run, name: str, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = SHORT_DISTILLATION if config.load(name).recipe.distill.steps else []
    flags = [part for assignment in small for part in ("--set", assignment)]
    result = document(run, "quantize", qwen3, "--stats", stats, "--out", out, "--config", name, *flags)
    loaded = settings.load(name, small).recipe
    assert document(run, "inspect", out)["recipe"] == loaded.model_dump(mode="json")
    assert {layer["method"] for layer in result["layers"]} == {"gptq" if loaded.gptq.enabled else "rtn"}


def test_a_data_free_recipe_needs_no_statistics(run: Run, llama: Path, tmp_path: Path) -> None:
    result = document(run, "quantize", llama, "--out", tmp_path / "out", "--config", "rtn")
    assert result["linears"] == LINEARS
    assert document(run, "inspect", tmp_path / "out")["provenance"]["calibration"] is None


def test_the_checkpoint_loads_and_runs(checkpoint: Path, qwen3: Path) -> None:
    import transformers

    import omniw4

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        ours = omniw4.load(checkpoint, dtype="float32")(input_ids=tokens).logits
        theirs = load(checkpoint, dtype=torch.float32)(input_ids=tokens).logits
        original = load(qwen3, dtype=torch.float32)(input_ids=tokens).logits
    assert torch.equal(ours, theirs)
    noise = (ours - original).norm() / original.norm()
    assert 0 < noise < 0.5


def test_patterns_and_overrides_reach_the_checkpoint(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--include", "*.mlp.*", "--skip", "re:.*layers\\.2\\..*", "--override", "*.down_proj:act_bits=8,rank=0")
    ran = document(run, "quantize", qwen3, "--stats", stats, "--out", out, *options)
    assert ran["linears"] == 3 * (LAYERS - 1)
    layers = {row["path"]: row for row in document(run, "inspect", out)["layers"]}
    assert {(row["act_bits"], row["rank"]) for p, row in layers.items() if "down_proj" in p} == {(8, 0)}
    assert {(row["act_bits"], row["rank"]) for p, row in layers.items() if "down_proj" not in p} == {(4, 16)}
    verdict = document(run, "verify", out, "--model", qwen3, "--windows", 1, "--seq-len", 32)
    assert verdict["passed"] is True


def test_a_searched_smoothing_is_recorded_and_shown(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    out, wanted = tmp_path / "out", "recipe.smooth.strength=search"
    ran = document(
        run, "quantize", qwen3, "--stats", stats, "--out", out, "--set", wanted, "--set", "recipe.gptq.order=activation"
    )
    chosen = {row["path"]: row["smooth_strength"] for row in ran["layers"]}
    assert all(0 <= strength <= 1 for strength in chosen.values())
    inspected = document(run, "inspect", out)
    assert {row["path"]: row["smooth_strength"] for row in inspected["layers"]} == chosen
    assert inspected["recipe"]["smooth"]["strength"] == "search"
    assert inspected["recipe"]["gptq"]["order"] == "activation"
    shown = run("inspect", out, "--layers").stdout.splitlines()
    head = next(i for i, line in enumerate(shown) if line.endswith("smoothing"))
    rows = [line.split() for line in shown[head + 2 : head + 2 + LINEARS]]
    assert {row[0]: float(row[-1]) for row in rows} == chosen
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(run("inspect", out, "--recipe").stdout)
    assert config.load(recipe).recipe.model_dump(mode="json") == inspected["recipe"]
    verdict = document(run, "verify", out, "--model", qwen3, "--windows", 1, "--seq-len", 32)
    assert verdict["passed"] is True


def test_dry_run_writes_nothing(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    plan = document(
        run, "quantize", qwen3, "--stats", stats, "--out", tmp_path / "out", "--dry-run", "--skip", "*.o_proj"
    )
    assert sorted(tmp_path.iterdir()) == before
    assert plan["quantized"] == 6 * LAYERS
    reasons = {row["path"]: row["skip_reason"] for row in plan["linears"] if row["spec"] is None}
    assert len(reasons) == LAYERS + 1
    assert reasons["lm_head"] == "outside the repeated blocks"
    assert plan["estimated_seconds"] >= 0
    assert plan["disk_bytes"] > plan["model_bytes_after"] > 0


def test_dry_run_says_what_the_run_does(run: Run, qwen3: Path, stats: Path, checkpoint: Path) -> None:
    plan = document(run, "quantize", qwen3, "--stats", stats, "--dry-run", "--set", "recipe.lowrank.rank=8")
    summary = document(run, "inspect", checkpoint)
    assert plan["effective_bits"] == pytest.approx(summary["effective_bits"])
    specs = {row["path"]: row["spec"]["rank"] for row in plan["linears"] if row["spec"]}
    assert specs == {row["path"]: row["rank"] for row in summary["layers"]}


def test_dry_run_needs_neither_out_nor_stats(run: Run, qwen3: Path) -> None:
    ran = run("quantize", qwen3, "--dry-run")
    assert ran.code == 0, ran.stderr
    for word in ("lm_head", "outside the repeated blocks", "peak memory", "disk", "time"):
        assert word in ran.stdout


def test_shards(run: Run, qwen3: Path, stats: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--set", "recipe.lowrank.rank=8", "--max-shard-size", "100KiB")
    document(run, "quantize", qwen3, "--stats", stats, "--out", out, *options)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    whole, sharded = (document(run, "inspect", p) for p in (checkpoint, out))
    assert {t["name"]: t["shape"] for t in whole["tensors"]} == {t["name"]: t["shape"] for t in sharded["tensors"]}


def test_a_log_has_few_lines_and_no_control_characters(
    run_process: Run, qwen3: Path, stats: Path, tmp_path: Path
) -> None:
    ran = run_process("quantize", qwen3, "--stats", stats, "--out", tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert not {"\r", "\x1b"} & set(ran.stdout + ran.stderr)
    assert 1 <= ran.stderr.count("\nquantizing ") < LINEARS / 2, "not one a layer, where a layer takes no time"
    assert f"\nquantizing {LINEARS}/{LINEARS}  " in ran.stderr
    assert ran.stdout.startswith(f"Wrote {tmp_path / 'out'}/ · {LINEARS} linears · ")
    assert len(ran.stdout.splitlines()) == 1


def test_quiet_says_nothing_but_the_result(run_process: Run, checkpoint: Path, qwen3: Path, text: Path) -> None:
    options = ("--windows", 1, "--seq-len", 32, "--layer-tokens", 8, "--quiet")
    ran = run_process("verify", checkpoint, "--model", qwen3, *options)
    assert ran.code == 0, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout.rstrip().endswith("passed")


def test_a_failed_gate_is_named_and_ends_with_1(run: Run, checkpoint: Path, qwen3: Path) -> None:
    options = ("--windows", 1, "--seq-len", 32, "--layer-tokens", 8, "--max-kl", "1e-9", "--max-layer-error", "1e-9")
    ran = run("verify", checkpoint, "--model", qwen3, *options)
    ran.failed(1, "2 of ", "max_kl", "max_layer_error")
    assert "FAIL  max_kl" in ran.stdout
    verdict = document(run, "verify", checkpoint, "--model", qwen3, *options, code=1)
    assert verdict["passed"] is False


def test_gates_come_from_the_config(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict.yaml"
    strict.write_text("verify: {windows: 1, seq_len: 32, gates: {max_kl: 1.0e-9}}", encoding="utf-8")
    command = ("verify", checkpoint, "--model", qwen3, "--config", strict, "--layer-tokens", 8)
    run(*command).failed(1, "max_kl")
    assert run(*command, "--max-kl", 10).code == 0


def test_verify_of_another_model_fails(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    from harness import save_model

    other = save_model(tmp_path / "other", seed=1)
    ran = run("verify", checkpoint, "--model", other, "--windows", 1, "--seq-len", 32)
    ran.failed(1, "source_model")


def test_a_damaged_checkpoint_fails_verification(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    run("verify", damaged, "--model", qwen3, "--windows", 1, "--seq-len", 32).failed(1, "hashes")
    run("inspect", damaged, "--hashes").failed(2, "model.safetensors")


def test_inspect_shows_layers_and_tensors(run: Run, checkpoint: Path) -> None:
    ran = run("inspect", checkpoint, "--layers", "--tensors")
    assert ran.code == 0, ran.stderr
    for word in ("w4a4 g64 r8 hadamard64", "words.txt", "model.layers.2.mlp.down_proj.w_scales", "bits a weight"):
        assert word in ran.stdout
    ran = run("inspect", checkpoint / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.qweight" in ran.stdout


def test_repack_auto_without_a_gpu_says_what_it_chose(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    ran = run("repack", copy, "--arch", "90")
    assert ran.code == 0, ran.stderr
    assert "wgmma_s8" in ran.stdout
    again = run("repack", copy, "--arch", "sm_90a")
    assert "is there already" in again.stdout


def test_repack_makes_a_cache_anew_in_which_a_bit_has_flipped(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert run("repack", copy, "--layout", "mma_s8").code == 0
    (file,) = (copy / ".omniw4-cache").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    ran = run("repack", copy, "--layout", "mma_s8")
    assert ran.code == 0
    assert "made anew" in ran.stderr
    assert file.read_bytes() == whole
    assert "is there already" in run("repack", copy, "--layout", "mma_s8").stdout


def test_calibrate_from_captured_hidden_states(run: Run, qwen3: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "hidden.safetensors"
    hidden = torch.randn(3, 40, HIDDEN, generator=torch.Generator().manual_seed(0))
    save_file({"hidden_states": hidden, "mask": torch.ones(3, 40, dtype=torch.bool)}, source)
    result = document(run, "calibrate", qwen3, "--source", source, "--out", tmp_path / "stats")
    assert result["fingerprint"]["data"]["tokens"] == 120
    assert (
        document(run, "quantize", qwen3, "--stats", tmp_path / "stats", "--out", tmp_path / "out")["linears"] == LINEARS
    )


def test_bench_without_a_checkpoint(run: Run) -> None:
    ran = run("bench", "--what", "ops", "--shapes", "2x64x64", "--repetitions", 2, "--warmup", 0)
    assert ran.code == 0, ran.stderr
    assert "gemm_lora_up" in ran.stdout
    assert "references in plain torch are timed" in ran.stdout
