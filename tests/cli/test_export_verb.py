"""``omniw4 export``, and what ``inspect`` does without reading weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Run


def test_export_writes_a_model_any_tool_reads(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "plain"
    judged = shutil.copytree(checkpoint, tmp_path / "judged")
    (judged / "verify.json").write_text("{}")
    ran = run("export", judged, "--dequantize", "--out", out, "--json")
    assert ran.code == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["linears"] == 21
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(document["files"])
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not (out / "verify.json").exists(), "a verdict on the checkpoint, not on this model"
    requantized = run("quantize", out, "--config", "rtn", "--dry-run", "--json")
    assert requantized.code == 0, requantized.stderr


def test_export_to_the_seed_s_format(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    made = run("quantize", qwen3, "--stats", stats, "--out", tmp_path / "seed", "--config", "seed")
    assert made.code == 0, made.stderr
    ran = run("export", tmp_path / "seed", "--format", "seed", "--out", tmp_path / "out")
    assert ran.code == 0, ran.stderr
    told = run("inspect", tmp_path / "out" / "w4a4_checkpoint.safetensors").stdout
    assert "model.layers.0.self_attn.q_proj.qweight" in told


def test_user_errors(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", checkpoint, "--out", out).failed(2, "--dequantize", "--format seed")
    run("export", checkpoint, "--out", out, "--format", "gguf").failed(2, "'gguf'", "hf or seed")
    run("export", checkpoint, "--out", out, "--dequantize", "--format", "seed").failed(2, "exclude")
    run("export", checkpoint, "--out", out, "--dequantize", "--dtype", "int3").failed(2, "int3")
    run("export", checkpoint, "--out", out, "--format", "seed").failed(2, "rotation", "--config seed")
    for flag, value in (("--dtype", "float32"), ("--max-shard-size", "1MB")):
        ran = run("export", checkpoint, "--out", out, "--format", "seed", flag, value)
        ran.failed(2, f"{flag} is for a plain model", f"hint: leave out {flag}")
    run("export", qwen3, "--out", out, "--dequantize").failed(2, "quantization_config")
    run("export", tmp_path / "none", "--out", out, "--dequantize").failed(2, "none")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_only_an_earlier_export_is_replaced(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    precious = shutil.copytree(qwen3, tmp_path / "model")
    run("export", checkpoint, "--out", precious, "--dequantize").failed(2, "exists")
    run("export", checkpoint, "--out", precious, "--dequantize", "--overwrite").failed(2, "no earlier result")
    assert (precious / "model.safetensors").read_bytes() == (qwen3 / "model.safetensors").read_bytes()
    out = tmp_path / "plain"
    for _ in range(2):
        assert run("export", checkpoint, "--out", out, "--dequantize", "--overwrite").code == 0


def test_an_interrupted_export_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omniw4.checkpoint import export

    real = export.export_dequantized

    def stopped(*arguments: Any, **keywords: Any) -> None:
        real(*arguments, **keywords)
        raise KeyboardInterrupt

    command = ("export", checkpoint, "--dequantize", "--out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(export, "export_dequantized", stopped)
        run(*command).failed(130, "nothing was written")
    assert list(tmp_path.iterdir()) == []
    assert run(*command).code == 0


def test_a_damaged_checkpoint_is_not_exported(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    run("export", damaged, "--out", tmp_path / "out", "--dequantize").failed(2, "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_inspect_reads_headers_alone(run: Run, tmp_path: Path) -> None:
    """A file of 200 GB, all hole: reading it would outlast the test's time limit."""
    file, length = tmp_path / "large.safetensors", 200_000_000_000
    header = json.dumps({"w": {"dtype": "F16", "shape": [length // 2], "data_offsets": [0, length]}}).encode()
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + length)
    assert os.stat(file).st_blocks * 512 < 1 << 20
    ran = run("inspect", file, "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["total_bytes"] == 8 + len(header) + length


@pytest.mark.parametrize("flag", ["--layers", "--hashes", "--recipe"])
def test_what_a_single_file_cannot_tell(run: Run, checkpoint: Path, flag: str) -> None:
    ran = run("inspect", checkpoint / "model.safetensors", flag)
    ran.failed(2, f"{flag} is about a checkpoint", "single file", "hint: name the checkpoint's folder")
    assert ran.stdout == ""
    assert run("inspect", checkpoint, flag).code == 0


def test_the_recipe_that_inspect_prints_runs_again(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    told = run("inspect", checkpoint, "--recipe").stdout
    text = told[told.index("recipe:") :]
    assert yaml.safe_load(text)["recipe"]["lowrank"]["rank"] == 8
    (tmp_path / "again.yaml").write_text(text, encoding="utf-8")
    planned = run("quantize", qwen3, "--config", tmp_path / "again.yaml", "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
