"""Layers of an unfinished run, kills, a full disk, and the memory that saving needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from quantized_samples import (
    RECIPE,
    fill_store,
    peak_growth,
    quantize_nearest,
    write_checkpoint,
)

from killing import die_at_event, folder_bytes
from omniw4.checkpoint import Checkpoint, LayerStore, assemble
from omniw4.errors import CheckpointError, NonFiniteTensorError, StorageError
from omniw4.model import LoadedModel
from omniw4.storage import OutputFolder, tensor_file
from omniw4.verify.integrity import first_difference


def test_layer_store_keeps_finished_layers(tmp_path: Path, loaded: LoadedModel) -> None:
    quantized = fill_store(tmp_path, loaded)
    store = LayerStore(tmp_path)
    assert store.done() == set(quantized)
    for path, linear in quantized.items():
        assert first_difference(store.linear(path), linear) == ""
        assert store.spec(path) == linear.spec
        assert store.report(path).seconds == 1.25


def test_damaged_layer_is_made_again(tmp_path: Path, loaded: LoadedModel) -> None:
    quantized = fill_store(tmp_path, loaded)
    files = sorted((tmp_path / "layers").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-3])
    files[1].write_bytes(b"")
    files[2].rename(tmp_path / "layers" / "other.safetensors")
    flipped = bytearray(files[3].read_bytes())
    flipped[-1] ^= 1
    files[3].write_bytes(flipped)
    assert len(LayerStore(tmp_path).done()) == len(quantized) - 4
    fill_store(tmp_path, loaded)
    assert LayerStore(tmp_path).done() == set(quantized)


def test_layer_with_nan_is_not_stored(tmp_path: Path, loaded: LoadedModel) -> None:
    linear, report = quantize_nearest("a.up_proj", loaded.model.model.layers[0].mlp.up_proj)
    linear.w_scales[3, 0] = math.nan
    store = LayerStore(tmp_path)
    with pytest.raises(NonFiniteTensorError, match=r"'a\.up_proj\.w_scales'\[3, 0\] is nan"):
        store.put("a.up_proj", linear, report)
    assert store.done() == set()


@pytest.mark.parametrize("path", ["a/b", "..", "x" * 300, "größe", "a b:c"])
def test_any_module_path_is_a_file_name(tmp_path: Path, loaded: LoadedModel, path: str) -> None:
    LayerStore(tmp_path).put(path, *quantize_nearest(path, loaded.model.model.layers[0].mlp.up_proj))
    assert LayerStore(tmp_path).done() == {path}
    assert [p.name for p in tmp_path.iterdir()] == ["layers"]


def run(out: Path, loaded: LoadedModel) -> None:
    with OutputFolder.begin(out, {"recipe": RECIPE}, resume=True) as folder:
        write_checkpoint(folder.result, folder.partial, loaded, max_shard_size=40_000)
        folder.commit()


def test_killed_and_resumed_gives_the_same_bytes(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    run(tmp_path / "whole" / "out", loaded)
    wanted = folder_bytes(tmp_path / "whole")
    event, killed = 1, 0
    while True:
        out = tmp_path / str(event) / "out"
        if not die_at_event(event, lambda out=out: run(out, loaded)):
            break
        killed += 1
        if out.exists():
            assert folder_bytes(out) == folder_bytes(tmp_path / "whole" / "out"), f"killed at event {event}"
        else:
            run(out, loaded)
            assert folder_bytes(out.parent) == wanted, f"killed at event {event}"
        event += 13
    assert killed >= 10


def test_full_disk_while_assembling(tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensor_file.TensorFileWriter.write_bytes

    def full(self: tensor_file.TensorFileWriter, name: str, chunks: object) -> None:
        real(self, name, chunks)  # type: ignore[arg-type]
        if name == "model.norm.weight":
            raise StorageError(f"cannot write {self.path.name!r}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.TensorFileWriter, "write_bytes", full)
        with pytest.raises(StorageError, match="No space left"):
            run(tmp_path / "out", loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "out.partial" / "result")
    run(tmp_path / "out", loaded)
    Checkpoint.open(tmp_path / "out").check_hashes()


def test_cut_off_writing_is_never_a_checkpoint(tmp_path: Path, loaded: LoadedModel) -> None:
    """Without an output folder around it, too: stop before each file that is renamed into place."""
    fill_store(tmp_path / "work", loaded)
    work: Callable[[Path], None] = lambda out: assemble(  # noqa: E731
        out, LayerStore(tmp_path / "work"), loaded, recipe=RECIPE, max_shard_size=40_000
    )
    work(tmp_path / "whole")
    event, accepted = 1, False
    while die_at_event(event, lambda event=event: work(tmp_path / str(event))):
        out = tmp_path / str(event)
        try:
            Checkpoint.open(out)
            accepted = True
        except CheckpointError:
            assert not accepted, f"killed at event {event}"
        if accepted:
            assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
        event += 5


def test_saving_needs_no_second_copy_in_memory(tmp_path: Path, loaded: LoadedModel) -> None:
    """192 MiB of other tensors, 64 MiB a shard: far less than one shard is held at a time."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    header, offset = {}, 0
    for number in range(12):
        header[f"t{number}"] = {"dtype": "F32", "shape": [4 << 20], "data_offsets": [offset, offset + (16 << 20)]}
        offset += 16 << 20
    raw = json.dumps(header).encode()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    big = replace(loaded, folder=source)
    store = LayerStore(tmp_path / "work")
    growth = peak_growth(lambda: assemble(tmp_path / "out", store, big, recipe=RECIPE, max_shard_size=64 << 20))
    assert growth < 32 << 20, f"{growth >> 20} MiB"
    assert len(Checkpoint.open(tmp_path / "out").files) == 3
