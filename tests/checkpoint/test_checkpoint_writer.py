"""A checkpoint written from a source model reads back as what went in, always as the same bytes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantized_samples import (
    CALIBRATION,
    DOWN,
    RECIPE,
    SKIPPED,
    SMOOTH,
    SPEC,
    fill_store,
    folder_bytes,
    peak_growth,
    quantize_nearest,
    spec_of,
    tiny_qwen3,
    write_checkpoint,
)
from safetensors import safe_open

from killing import die_at_event
from omniw4 import config
from omniw4.checkpoint import Checkpoint, LayerStore, assemble, parse_size, summarize
from omniw4.checkpoint.header import read_header
from omniw4.checkpoint.source import FileTensors, ModuleTensors, open_tensors, without_machine_paths
from omniw4.checkpoint.writer import Entry, plan_shards
from omniw4.errors import CheckpointError, NonFiniteTensorError, StorageError, UsageError
from omniw4.model import LoadedModel
from omniw4.storage import OutputFolder, tensor_file
from omniw4.tensors import QuantizedLinear
from omniw4.verify.integrity import first_difference


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> tuple[Path, dict[str, QuantizedLinear]]:
    base = tmp_path_factory.mktemp("written")
    return base / "out", dict(write_checkpoint(base / "out", base / "work", loaded))


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


# ---- sharding


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


# ---- where the other tensors come from


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


# ---- layers of an unfinished run


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
    assert len(LayerStore(tmp_path).done()) == len(quantized) - 3
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


# ---- crashes and memory


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


# ---- summary


def test_summary_of_a_checkpoint(written: tuple[Path, dict[str, QuantizedLinear]]) -> None:
    folder, quantized = written
    summary = summarize(folder)
    assert (summary.kind, summary.name, summary.hash) == ("checkpoint", "out", Checkpoint.open(folder).hash)
    assert [row.path for row in summary.layers] == sorted(quantized)
    rows = {row.path: row for row in summary.layers}
    down = rows["model.layers.0.mlp.down_proj"]
    assert (down.out_features, down.in_features, down.act_bits, down.rank) == (64, 128, DOWN.act_bits, 0)
    assert down.bits == 4.25
    assert rows["model.layers.1.mlp.up_proj"].rotation == SMOOTH.rotation
    weights = sum(q.out_features * q.in_features for q in quantized.values())
    stored = sum(q.effective_bits() * q.out_features * q.in_features for q in quantized.values())
    assert summary.effective_bits == pytest.approx(stored / weights)
    assert summary.original_bytes == 2 * weights
    assert summary.quantized_bytes + summary.other_bytes == sum(row.bytes for row in summary.tensors)
    assert summary.total_bytes == (folder / "model.safetensors").stat().st_size
    assert json.loads(json.dumps(summary.to_dict()))["recipe"] == RECIPE


def test_summary_of_a_file(source_folder: Path) -> None:
    summary = summarize(source_folder / "model.safetensors")
    assert (summary.kind, summary.name) == ("file", "model.safetensors")
    assert summary.metadata == {"format": "pt"}
    assert {row.name: (row.dtype, row.shape) for row in summary.tensors}["model.norm.weight"] == ("BF16", [64])
    with pytest.raises(CheckpointError, match="no quantization_config"):
        summarize(source_folder)
