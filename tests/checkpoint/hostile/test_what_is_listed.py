"""What a checkpoint lists and has not, settings of other weights, and JSON at the limit of its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raw_checkpoint import raw_checkpoint

from omniw4.checkpoint import Checkpoint, validate
from omniw4.checkpoint.header import TensorFile, TensorInfo
from omniw4.errors import (
    HashMismatchError,
    MalformedJsonError,
    MissingFileError,
    MissingShardError,
    MissingTensorError,
    RenamedTensorError,
    ShardIndexError,
)


def test_a_tensor_file_that_is_gone_after_opening(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(raw_checkpoint(1).write(tmp_path / "c"))
    (tmp_path / "c" / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"no file 'model\.safetensors', though omniw4\.json lists it"):
        checkpoint.check_hashes()


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json in"):
        validate.read_shards(tmp_path)


def test_a_name_longer_than_any_file_s(tmp_path: Path) -> None:
    index = {"weight_map": {"a": f"{'x' * 5000}.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingShardError, match="which is not there"):
        validate.read_shards(tmp_path)


def test_json_may_be_as_long_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    monkeypatch.setattr(validate, "MAX_HEADER_BYTES", 8)
    assert validate.read_json(file) == {"a": 1}
    monkeypatch.setattr(validate, "MAX_HEADER_BYTES", 7)
    with pytest.raises(MalformedJsonError, match="holds 8 bytes, more than the allowed 7"):
        validate.read_json(file)


def test_the_alike_tensor_is_named_where_one_was_renamed() -> None:
    """Of several unknown tensors the one of the missing one's dtype and shape."""
    others = {name: TensorInfo(dtype, shape, 0, 0) for name, dtype, shape in TENSORS}
    with pytest.raises(RenamedTensorError, match="'a' is missing and 'y' is unknown"):
        validate._check_listed({"a": str(others["y"])}, others)


TENSORS = (("x", "F16", (2, 3)), ("y", "F32", (4,)), ("z", "F16", (4,)))


@pytest.mark.parametrize(
    ("listed", "found", "told"),
    [
        (
            {"a.safetensors": {}, "b.safetensors": {}},
            ["a"],
            r"'b\.safetensors' belongs to omniw4\.json and not to",
        ),
        ({"a.safetensors": {}}, ["a", "b"], r"'b\.safetensors' belongs to the weights and not to omniw4\.json"),
    ],
)
def test_which_side_lacks_a_file(listed: dict[str, dict], found: list[str], told: str) -> None:
    shards = [TensorFile(Path(f"{name}.safetensors"), {}, {}, 0) for name in found]
    with pytest.raises(ShardIndexError, match=told):
        validate._check_manifest_files(listed, shards)


def test_distillation_must_be_a_mapping(tmp_path: Path) -> None:
    folder = raw_checkpoint(1).write(tmp_path / "c")
    manifest = json.loads((folder / "omniw4.json").read_text())
    (folder / "omniw4.json").write_text(json.dumps({**manifest, "distillation": []}))
    with pytest.raises(MalformedJsonError, match="distillation is of the wrong type"):
        Checkpoint.open(folder)


def test_settings_and_weights_belong_together(tmp_path: Path) -> None:
    folder = raw_checkpoint(1).write(tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    manifest = json.loads((folder / "omniw4.json").read_text())
    right = validate.content_hash(config, manifest["files"])
    for written in (right, None):  # a writer may leave it out
        (folder / "omniw4.json").write_text(json.dumps({**manifest, "hash": written}))
        Checkpoint.open(folder)
    (folder / "omniw4.json").write_text(json.dumps({**manifest, "hash": "0" * 64}))
    with pytest.raises(HashMismatchError, match="are not those that were written together"):
        Checkpoint.open(folder)


def test_which_side_lacks_a_report() -> None:
    with pytest.raises(MalformedJsonError, match=r"linear 'a' is listed in omniw4\.json alone"):
        validate._check_reports({"a": {}}, {})
    with pytest.raises(MalformedJsonError, match="linear 'a' is listed in quantization_config alone"):
        validate._check_reports({}, dict.fromkeys("a"))
    with pytest.raises(MalformedJsonError, match=r"layers\['a'\] is no mapping"):
        validate._check_reports({"a": []}, dict.fromkeys("a"))
    validate._check_reports({"a": {}}, dict.fromkeys("a"))


@pytest.mark.parametrize(
    ("names", "told"), [("a", r"F16\[2\] is missing$"), ("ab", r"\(and 1 more\)$"), ("abc", r"\(and 2 more\)$")]
)
def test_how_many_tensors_are_missing(names: str, told: str) -> None:
    with pytest.raises(MissingTensorError, match=told):
        validate._check_listed(dict.fromkeys(names, "F16[2]"), {})
