"""A checkpoint in other forms: the plain model loads as any, and computes what the quantized weights stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from omniw4.checkpoint import Checkpoint
from omniw4.checkpoint.export import NOTE, SEED_FILE, export_dequantized, export_seed
from omniw4.errors import UsageError
from omniw4.runtime.load import load
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint

WEIGHTS_ALONE = LinearSpec(act_bits=16, rank=8)
SEED = LinearSpec(rank=8, rotation="none")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, biases, rotation, one smoothed linear, sharded."""
    folder = tmp_path_factory.mktemp("export")
    model = qwen3(attention_bias=True, tie_word_embeddings=True).to(torch.bfloat16)
    smooth = {"layers.1.mlp.up_proj": replace(WEIGHTS_ALONE, smooth=True)}
    write_checkpoint(model, folder, WEIGHTS_ALONE, smooth, max_shard_size=200_000)
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def seed_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seed")
    write_checkpoint(qwen3(tie_word_embeddings=True), folder, SEED)
    return folder / "checkpoint"


def test_the_plain_model_computes_what_the_quantized_one_does(quantized: Path, tmp_path: Path) -> None:
    """With 16-bit activations the quantized model differs by rounding alone."""
    used = export_dequantized(Checkpoint.open(quantized), tmp_path, dtype=torch.float32)
    assert used == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not hasattr(plain.config, "quantization_config")
    assert sum(type(m) is torch.nn.Linear for m in plain.modules()) == 15
    ids = torch.arange(40)[None] * 7 % 300
    with torch.inference_mode():
        wanted, found = load(quantized)(ids).logits, plain(ids).logits
    assert (found - wanted).norm() / wanted.norm() < 1e-5


def test_weights_are_rounded_once_and_the_rest_is_copied(quantized: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantized)
    used = export_dequantized(checkpoint, tmp_path, max_shard_size=150_000)
    assert used == torch.bfloat16, "the model's own"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {name: t for file in set(index["weight_map"].values()) for name, t in load_file(tmp_path / file).items()}
    for path in checkpoint.specs:
        exact = checkpoint.linear(path).dequantize(torch.float64)
        assert torch.equal(found.pop(f"{path}.weight"), exact.to(torch.bfloat16))
        bias = checkpoint.linear(path).bias
        if bias is not None:
            assert torch.equal(found.pop(f"{path}.bias"), bias)
    assert found.keys() == set(checkpoint.other_names)
    assert all(torch.equal(tensor, checkpoint.other(name)) for name, tensor in found.items())
    assert not (tmp_path / "omniw4.json").exists()


def test_progress_counts_every_linear(quantized: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    export_dequantized(Checkpoint.open(quantized), tmp_path, on_linear=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(1, 15))
    assert {total for _, total, _ in seen} == {14}


def test_the_seed_s_file_holds_the_canonical_tensors(seed_like: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(seed_like)
    file = export_seed(checkpoint, tmp_path)
    assert file == tmp_path / SEED_FILE
    found = load_file(file)
    for path in checkpoint.specs:
        linear = checkpoint.linear(path)
        assert torch.equal(found.pop(f"{path}.qweight"), linear.qweight)
        assert torch.equal(found.pop(f"{path}.w_scales"), linear.w_scales)
        for part in ("proj_down", "proj_up"):
            tensor = found.pop(f"{path}.{part}")
            assert tensor.dtype == torch.float16
            assert torch.equal(tensor, getattr(linear, part))
    assert not found
    assert json.loads((tmp_path / NOTE).read_text())["checkpoint"] == checkpoint.hash


@pytest.mark.parametrize(
    ("change", "word"),
    [({"rotation": "hadamard64"}, "rotation"), ({"act_bits": 8}, "act_bits"), ({"act_clip": 0.9}, "act_clip")],
)
def test_the_seed_s_format_refuses_what_it_cannot_say(tmp_path: Path, change: dict[str, object], word: str) -> None:
    one = {"layers.1.mlp.down_proj": replace(SEED, **change)}  # type: ignore[arg-type]
    write_checkpoint(qwen3(num_hidden_layers=2), tmp_path, SEED, one)
    with pytest.raises(UsageError, match=rf"model\.layers\.1\.mlp\.down_proj: its {word} is") as caught:
        export_seed(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "out")
    assert "--config seed" in caught.value.hint
    assert not (tmp_path / "out").exists()
