"""``scripts/large_model.py``: the model that it makes is one, and its figures are those of 8 billion weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omniw4 import model as models

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "large_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_model"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_model_is_read_from_its_shards_and_its_activations_are_sane(script: ModuleType, tmp_path: Path) -> None:
    sizes = script.Sizes(layers=6, hidden=128, mlp=192, heads=4, kv_heads=2, head_dim=32, vocab=300)
    total = script.make_model(tmp_path / "model", sizes, "cpu")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == sizes.layers + 2
    assert models.stream(tmp_path / "model") is not None, "its tensors have the names and shapes of its parameters"
    loaded = models.load(tmp_path / "model")
    assert sum(p.numel() for p in loaded.model.parameters()) == total
    assert loaded.tokenizer is not None
    tokens = torch.tensor([loaded.tokenizer("Once upon a time")["input_ids"]])
    with torch.no_grad():
        states = loaded.model(tokens, output_hidden_states=True).hidden_states
    assert all(0.3 < float(state.square().mean().sqrt()) < 3 for state in states)


def test_its_sizes_are_those_of_8_billion_weights(script: ModuleType) -> None:
    shapes = [shape for shard in script.Sizes().shards() for shape in shard.values()]
    assert sum(shape[0] * (shape[1:] or (1,))[0] for shape in shapes) == 8_190_735_360  # Qwen3-8B's
    assert 50e9 < script.Sizes().disk_bytes() < 60e9
