"""A tiny source model on disk, as users have them, and a data-free quantization of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantized_samples import tiny_qwen3, write_checkpoint

from omniw4 import model as models
from omniw4.model import LoadedModel
from omniw4.tensors import QuantizedLinear


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer, licence, model card, a component with weights of its own, and files that must stay behind."""
    from tokenizers import Tokenizer
    from tokenizers import models as token_models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    tiny_qwen3().save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(96)}
    words = Tokenizer(token_models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "README.md").write_text("# another model")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("x")
    (folder / "audio_tokenizer" / "nested").mkdir(parents=True)
    (folder / "audio_tokenizer" / "config.json").write_text("{}")
    (folder / "audio_tokenizer" / "nested" / "x.txt").write_text("x")
    (folder / "audio_tokenizer" / "model.safetensors").write_bytes(b"weights of the codec")
    return folder


@pytest.fixture(scope="session")
def loaded(source_folder: Path) -> LoadedModel:
    return models.load(source_folder)


@pytest.fixture
def source_json(source_folder: Path) -> dict:
    return json.loads((source_folder / "config.json").read_text())


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> tuple[Path, dict[str, QuantizedLinear]]:
    base = tmp_path_factory.mktemp("written")
    return base / "out", dict(write_checkpoint(base / "out", base / "work", loaded))
