"""A checkpoint written from a source model reads back as what went in, always as the same bytes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantized_samples import (
    CALIBRATION,
    RECIPE,
    SKIPPED,
    SPEC,
    fill_store,
    spec_of,
    write_checkpoint,
)
from safetensors import safe_open

from killing import folder_bytes
from omniw4 import config
from omniw4.checkpoint import Checkpoint, parse_size
from omniw4.checkpoint.header import read_header
from omniw4.checkpoint.writer import Entry, plan_shards
from omniw4.errors import UsageError
from omniw4.model import LoadedModel
from omniw4.tensors import QuantizedLinear
from omniw4.verify.integrity import first_difference


def test_linears_read_back_bit_for_bit(written: tuple[Path, dict[str, QuantizedLinear]]) -> None:
    folder, quantized = written
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.specs) == sorted(quantized)
    for path, linear in quantized.items():
        found = checkpoint.linear(path)
        assert found.spec == linear.spec, path
        assert first_difference(found, linear) == "", path
        assert (checkpoint.linears[path].bias, found.bias is not None) == ((linear.bias is not None,) * 2)
        assert checkpoint.linears[path].effective_bits == pytest.approx(linear.effective_bits())
    with pytest.raises(KeyError):
        checkpoint.linear("model.layers.9.mlp.up_proj")


def test_other_tensors_are_the_source_bytes(written: tuple[Path, dict], source_folder: Path) -> None:
    folder, quantized = written
    checkpoint = Checkpoint.open(folder)
    source = read_header(source_folder / "model.safetensors")
    replaced = {f"{path}.{part}" for path in quantized for part in ("weight", "bias")}
    assert set(checkpoint.other_names) == source.tensors.keys() - replaced
    assert "lm_head.weight" not in checkpoint.other_names, "the head is tied to the embedding and stored once"
    for name in checkpoint.other_names:
        (file,) = [file for file in checkpoint.files if name in file.tensors]
        assert str(file.tensors[name]) == str(source.tensors[name])
        assert b"".join(file.chunks(name)) == b"".join(source.chunks(name)), name


def test_config_keeps_the_model_and_gains_the_quantization(written: tuple[Path, dict], source_json: dict) -> None:
    found = json.loads((written[0] / "config.json").read_text())
    quantization = found.pop("quantization_config")
    assert found == source_json
    assert list(found) == list(source_json)
    assert quantization.pop("modules") == {
        "lm_head": "skip",
        **{
            path: {key: value for key, value in spec_of(path).to_dict().items() if value != SPEC.to_dict()[key]}
            for path in written[1]
        },
    }
    assert quantization == {"quant_method": "omniw4", "format_version": 1, **SPEC.to_dict()}


def test_files_that_go_along_and_those_that_do_not(written: tuple[Path, dict], source_folder: Path) -> None:
    found = folder_bytes(written[0])
    made = {"config.json", "model.safetensors", "omniw4.json"}
    copied = {
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"),
        *("audio_tokenizer/config.json", "audio_tokenizer/nested/x.txt", "audio_tokenizer/model.safetensors"),
    }
    assert set(found) == made | copied
    for name in copied:
        assert found[name] == (source_folder / name).read_bytes(), name


def test_metadata_is_whole_and_re_runs(written: tuple[Path, dict], loaded: LoadedModel) -> None:
    checkpoint = Checkpoint.open(written[0])
    parsed = config.parse({"recipe": checkpoint.recipe}, origin="checkpoint")
    assert parsed.recipe.model_dump(mode="json") == RECIPE
    assert checkpoint.provenance == {
        "format_version": 1,
        "omniw4_version": "0.1.0",
        "source": {"name": "tiny-qwen3", "hash": loaded.hash},
        "calibration": {**CALIBRATION, "file": "text.txt"},
        "distillation": None,
    }
    assert checkpoint.skipped == SKIPPED
    report = checkpoint.reports["model.layers.0.mlp.down_proj"]
    assert (report.path, report.method, report.relative_error, report.sqnr_db) == (
        "model.layers.0.mlp.down_proj",
        "rtn",
        0.1 + 1e-17,
        12.5,
    )
    assert math.isnan(report.rank_energy)
    assert report.rounds[0] == 0.2
    assert report.seconds == 0.0


def test_same_inputs_give_the_same_bytes_and_no_machine(
    tmp_path: Path, loaded: LoadedModel, source_folder: Path
) -> None:
    elsewhere = tmp_path / "moved" / source_folder.name
    shutil.copytree(source_folder, elsewhere)
    results = []
    for number, origin in enumerate([source_folder, elsewhere]):
        moved = replace(loaded, source=str(origin), folder=origin)
        write_checkpoint(tmp_path / f"out{number}", tmp_path / f"work{number}", moved)
        results.append(folder_bytes(tmp_path / f"out{number}"))
    assert results[0] == results[1]
    for name, data in results[0].items():
        for path in (tmp_path, source_folder.parent, Path.home()):
            assert str(path).encode() not in data, name


def test_break_does_not_show(tmp_path: Path, loaded: LoadedModel) -> None:
    write_checkpoint(tmp_path / "whole", tmp_path / "work0", loaded)
    fill_store(tmp_path / "work1", loaded, lambda path: "layers.1" in path)
    write_checkpoint(tmp_path / "resumed", tmp_path / "work1", loaded)
    assert folder_bytes(tmp_path / "whole") == folder_bytes(tmp_path / "resumed")


@pytest.mark.parametrize("size", [1, 4096, 20_000])
def test_shards_hold_the_same_tensors(
    tmp_path: Path, loaded: LoadedModel, written: tuple[Path, dict], size: int
) -> None:
    write_checkpoint(tmp_path / "out", tmp_path / "work", loaded, max_shard_size=size)
    single, sharded = Checkpoint.open(written[0]), Checkpoint.open(tmp_path / "out")
    assert len(sharded.files) > 1
    assert sharded.hash != single.hash
    assert sharded.other_names == single.other_names
    for path in single.specs:
        assert first_difference(single.linear(path), sharded.linear(path)) == ""
    for name in single.other_names:
        assert torch.equal(single.other(name), sharded.other(name))
    for file in sharded.files:
        data = sum(info.nbytes for info in file.tensors.values())
        assert data <= size or len(file.tensors) == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(i.nbytes for f in single.files for i in f.tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as reader:
            assert name in reader.keys()  # noqa: SIM118
    sharded.check_hashes()


def test_shard_plan() -> None:
    entries = [Entry(name, "U8", (size,), None) for name, size in zip("abcde", (4, 6, 20, 0, 1), strict=True)]
    names = {file: [e.name for e in shard] for file, shard in plan_shards(entries, 10).items()}
    assert names == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
    assert list(plan_shards(entries, 31)) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("500MiB", 500 << 20), (" 1.5 kb ", 1500), ("4096", 4096), ("2T", 2 * 10**12), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "5 apples", "1e3", "0.1"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--max-shard-size"):
        parse_size(text)
