"""A model read from disk as it is needed gives the bytes that a loaded one gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import kills
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from killing import folder_bytes
from omniw4 import model as models
from omniw4.checkpoint import LayerStore
from omniw4.errors import ModelError
from tiny_checkpoint import SIZES, make_tokenizer


def save(folder: Path, **changes: Any) -> Path:
    """A tiny model in three shards."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "attention_bias": True, **changes}))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    make_tokenizer(adds_bos=True).save_pretrained(folder)
    return folder


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "model", tie_word_embeddings=request.param)


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_quantize_from_disk_and_from_memory(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    command = ("quantize", sharded, "--config", "rtn", "--dtype", dtype, "--include", "*.mlp.*", "--include", "lm_head")
    assert kills.run(*command, "--out", tmp_path / "streamed" / "out") == 0
    monkeypatch.setattr(models, "stream", lambda *a, **k: None)
    assert kills.run(*command, "--out", tmp_path / "loaded" / "out") == 0
    assert folder_bytes(tmp_path / "streamed" / "out") == folder_bytes(tmp_path / "loaded" / "out")


def test_calibrate_offloaded(sharded: Path, text: Path, tmp_path: Path) -> None:
    command = ("calibrate", sharded, "--dataset", text, *kills.CALIBRATE)
    assert kills.run(*command, "--out", tmp_path / "loaded") == 0
    assert kills.run(*command, "--out", tmp_path / "offloaded", "--offload") == 0
    assert folder_bytes(tmp_path / "loaded") == folder_bytes(tmp_path / "offloaded")


def test_offloaded_blocks_come_and_go(sharded: Path) -> None:
    streamed = models.offload(sharded)
    whole = models.load(sharded)
    blocks = models.find_blocks(streamed.loaded.model)
    for index, (path, block) in enumerate(blocks):
        with streamed.resident(index):
            for name, parameter in block.named_parameters():
                assert torch.equal(parameter, whole.model.get_parameter(f"{path}.{name}"))
            others = [p for i, (_, other) in enumerate(blocks) if i != index for p in other.parameters()]
            assert all(p.is_meta for p in others)
        assert all(p.is_meta for p in block.parameters())
    for name, buffer in whole.model.named_buffers():
        assert torch.equal(streamed.loaded.model.get_buffer(name), buffer), name


def test_a_model_that_does_not_fit_its_files_is_loaded_as_a_whole(sharded: Path, text: Path, tmp_path: Path) -> None:
    """Which then says what is wrong; --offload cannot, and says so."""
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    assert models.stream(sharded) is None
    with pytest.raises(ModelError, match="cannot be read block by block"):
        models.offload(sharded)
    told = tmp_path / "stderr"
    child = kills.start("quantize", sharded, "--config", "rtn", "--out", tmp_path / "out", stderr=told)
    assert kills.wait(child) == 2
    assert "do not fit its config.json" in told.read_text()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", ["config.json", "*.safetensors"])
def test_a_model_that_changes_while_it_is_quantized_makes_no_checkpoint(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool, name: str
) -> None:
    """Half of its linears would be another model's."""
    put, told = LayerStore.put, tmp_path / "stderr"

    def put_and_change(self: LayerStore, *linear: Any) -> None:
        put(self, *linear)
        file = max(sharded.glob(name))
        data = file.read_bytes()
        file.write_bytes(data + b" " if name == "config.json" else data[:-1] + bytes([(data[-1] + 1) % 256]))

    monkeypatch.setattr(LayerStore, "put", put_and_change)
    if not streamed:
        monkeypatch.setattr(models, "stream", lambda *a, **k: None)
    command = ("quantize", sharded, "--config", "rtn", "--include", "*.gate_proj", "--out", tmp_path / "out")
    assert kills.wait(kills.start(*command, stderr=told)) == 2
    assert not (tmp_path / "out").exists()
    assert "changed while it was read" in told.read_text()


def test_a_file_that_changed_is_read_no_more(sharded: Path) -> None:
    streamed = models.stream(sharded)
    assert streamed is not None
    path = models.find_blocks(streamed.loaded.model)[1][0] + ".mlp.up_proj"
    streamed.linear(path)
    for file in sharded.glob("*.safetensors"):
        shutil.copy(file, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)  # as a download ends
    with pytest.raises(ModelError, match=r"'model-\d+-of-\d+.safetensors' changed while it was read"):
        streamed.linear(path)
    with pytest.raises(ModelError, match="'model' changed while it was read"):
        models.check_unchanged(streamed.loaded, "0" * 64)
