"""Files that a checkpoint lists and that are not there, and JSON at the limit of its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raw_checkpoint import raw_checkpoint

from omniw4.checkpoint import Checkpoint, validate
from omniw4.errors import MalformedJsonError, MissingFileError, MissingShardError


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
