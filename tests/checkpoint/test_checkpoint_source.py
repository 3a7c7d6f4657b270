"""What a checkpoint takes over from its source model, from files or from memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantized_samples import (
    RECIPE,
    quantize_nearest,
    tiny_qwen3,
    write_checkpoint,
)

from killing import folder_bytes
from omniw4.checkpoint import Checkpoint, LayerStore, assemble
from omniw4.checkpoint.source import FileTensors, ModuleTensors, open_tensors, without_machine_paths
from omniw4.errors import CheckpointError
from omniw4.model import LoadedModel
from omniw4.tensors import QuantizedLinear


def shapes(quantized: dict[str, QuantizedLinear]) -> dict[str, tuple[int, int]]:
    return {path: (linear.out_features, linear.in_features) for path, linear in quantized.items()}


def test_files_are_copied_where_they_fit(loaded: LoadedModel, written: tuple[Path, dict], tmp_path: Path) -> None:
    fitting = shapes(written[1])
    assert isinstance(open_tensors(loaded, fitting), FileTensors)
    assert isinstance(open_tensors(loaded, {"lm_head": (96, 64)}), FileTensors), "tied: not in the files"
    assert isinstance(open_tensors(loaded, {"layers.0.mlp.up_proj": (128, 64)}), ModuleTensors), "renamed on load"
    assert isinstance(open_tensors(loaded, {"model.layers.0.mlp.up_proj": (64, 64)}), ModuleTensors), "merged on load"
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(open_tensors(replace(loaded, folder=tmp_path), fitting), ModuleTensors), "no safetensors"
    assert isinstance(open_tensors(replace(loaded, folder=None), fitting), ModuleTensors)


def test_model_without_files(tmp_path: Path, loaded: LoadedModel) -> None:
    """As from GGUF: tensors, config and tokenizer come from memory; a tied head is still stored once."""
    memory = replace(loaded, folder=None, source="/somewhere/model.gguf")
    write_checkpoint(tmp_path / "out", tmp_path / "work", memory)
    checkpoint = Checkpoint.open(tmp_path / "out")
    state = loaded.model.state_dict()
    assert "lm_head.weight" in state
    assert "lm_head.weight" not in checkpoint.other_names
    assert "model.embed_tokens.weight" in checkpoint.other_names
    for name in checkpoint.other_names:
        assert checkpoint.other(name).dtype == state[name].dtype
        assert torch.equal(checkpoint.other(name), state[name]), name
    assert checkpoint.provenance["source"]["name"] == "model.gguf"
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is True
    names = set(folder_bytes(tmp_path / "out"))
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    assert not [name for name in names if name.startswith(".")]
    from transformers import AutoConfig, AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_ids_to_tokens([5]) == ["t5"]
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 64


def test_untied_head_is_stored_by_itself(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=False)
    loaded = LoadedModel(model, None, "m", "0")
    write_checkpoint(tmp_path / "out", tmp_path / "work", loaded)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert torch.equal(checkpoint.other("lm_head.weight"), model.lm_head.weight)


def test_quantized_head_is_no_longer_tied(tmp_path: Path, loaded: LoadedModel) -> None:
    store = LayerStore(tmp_path / "work")
    store.put("lm_head", *quantize_nearest("lm_head", loaded.model.lm_head))
    assemble(tmp_path / "out", store, loaded, recipe=RECIPE)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "model.embed_tokens.weight" in checkpoint.other_names
    assert "model.layers.0.mlp.up_proj.weight" in checkpoint.other_names
    assert list(checkpoint.specs) == ["lm_head"]


def test_damaged_source_is_named(tmp_path: Path, loaded: LoadedModel, source_folder: Path) -> None:
    shutil.copytree(source_folder, tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors holds"):
        write_checkpoint(tmp_path / "out", tmp_path / "work", replace(loaded, folder=tmp_path / "source"))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": ["/home/u/text.txt"]}, {"a": ["text.txt"]}),
        ("C:\\Users\\u\\text.txt", "text.txt"),
        ("~/x/y", "y"),
        ("../x/y", "y"),
        ("org/model", "org/model"),
        (3.5, 3.5),
        (None, None),
        ("/", "/"),
    ],
)
def test_paths_of_the_machine_are_cut(value: object, wanted: object) -> None:
    assert without_machine_paths(value) == wanted
