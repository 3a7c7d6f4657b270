"""A checkpoint that is replaced while it is read: never tensors of two."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from killing import folder_bytes
from omniw4.checkpoint import Checkpoint, validate
from omniw4.errors import ChangedFileError
from omniw4.storage import output_folder
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of one structure in three shards each, and of other weights."""
    folders = []
    for name, rank in (("a", 8), ("b", 8)):
        (tmp_path / name).mkdir()
        model = qwen3(tie_word_embeddings=True)
        if name == "b":
            model.model.layers[0].mlp.up_proj.weight.data.mul_(2)  # type: ignore[union-attr, operator]
        write_checkpoint(model, tmp_path / name, LinearSpec(rank=rank), max_shard_size=100_000)
        folders.append(tmp_path / name / "checkpoint")
    assert len(list(folders[0].glob("*.safetensors"))) > 2
    assert {p.name: p.stat().st_size for p in folders[0].glob("*.safetensors")} == {
        p.name: p.stat().st_size for p in folders[1].glob("*.safetensors")
    }
    return folders[0], folders[1]


def exchange(a: Path, b: Path) -> None:
    assert output_folder._exchange(a, b)


def test_an_opened_checkpoint_is_not_read_on_from_another(two: tuple[Path, Path]) -> None:
    """As ``omniw4 quantize --overwrite`` puts one in the place of the other: one step, the same names and sizes."""
    old = Checkpoint.open(two[0])
    path = "model.layers.0.mlp.up_proj"
    old.linear(path)
    exchange(*two)
    for read in (lambda: old.linear(path), lambda: old.other("model.norm.weight")):
        with pytest.raises(ChangedFileError, match="was replaced or written to while it was read"):
            read()
    Checkpoint.open(two[0]).linear(path)
    exchange(*two)
    old.linear(path)  # it is there again


def test_one_that_is_written_to(two: tuple[Path, Path]) -> None:
    opened = Checkpoint.open(two[0])
    for file in two[0].glob("*.safetensors"):
        shutil.copyfile(two[1] / file.name, file)
        os.utime(file, ns=(0, 0))
    with pytest.raises(ChangedFileError):
        opened.linear("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("after", ["read_json", "_read_manifest", "read_shards", "_check_index"])
def test_replaced_while_it_is_opened(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Between any two of the files."""
    original = getattr(validate, after)

    def then_exchanged(*arguments: object) -> object:
        result = original(*arguments)
        monkeypatch.setattr(validate, after, original)
        exchange(*two)
        return result

    before = [folder_bytes(folder) for folder in two]
    monkeypatch.setattr(validate, after, then_exchanged)
    with pytest.raises(ChangedFileError):
        Checkpoint.open(two[0])
    assert [folder_bytes(folder) for folder in reversed(two)] == before
    Checkpoint.open(two[0]).check_hashes()
