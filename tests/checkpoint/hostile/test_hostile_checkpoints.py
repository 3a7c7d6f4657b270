"""No broken checkpoint is read: each way to be wrong has its own error, which names what is wrong."""

from __future__ import annotations

import inspect
import json
import shutil
import tracemalloc
from pathlib import Path

import hostile_folders as folders
import hostile_headers as headers
import hostile_integer_scales as integer
import hostile_tensors as tensors
import pytest
from hostile_case import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_checkpoint import PATH, raw_checkpoint, read_parts, write_parts

from omniw4 import errors
from omniw4.checkpoint import Checkpoint, summarize
from omniw4.checkpoint.header import read_header
from omniw4.errors import CheckpointError, HashMismatchError, MissingFileError

GENERATORS = (
    *(headers.truncations, headers.lengths, headers.malformed_headers, headers.wrong_sizes),
    *(tensors.wrong_tensors, tensors.missing_and_extra, tensors.values, tensors.flipped_data),
    integer.integer_scales,
    *(folders.configs, folders.indexes, folders.manifests, folders.files),
)
CASES: list[Case] = [case for generator in GENERATORS for case in generator()]
STAGES = {
    "open": lambda folder: Checkpoint.open(folder),
    "read": lambda folder: [c.linear(path) for c in [Checkpoint.open(folder)] for path in c.specs],
    "hash": lambda folder: Checkpoint.open(folder).check_hashes(),
}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_broken_checkpoint_is_refused(tmp_path: Path, case: Case) -> None:
    folder = case.make(tmp_path / "checkpoint")
    if case.stage != "open":
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        STAGES[case.stage](folder)
    assert type(caught.value) is case.error, caught.value
    message = str(caught.value)
    for name in case.mentions:
        assert name in message, message
    assert len(message) < 400, "one sentence, however large the numbers"


def test_every_error_has_a_case() -> None:
    named = {
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, CheckpointError) and error is not CheckpointError
    }
    # of what changes while it is read there are tests in test_checkpoint_replaced.py
    assert named - {errors.ChangedFileError} == {case.error for case in CASES}


@pytest.mark.parametrize("shards", [1, 3])
def test_the_unbroken_checkpoint_is_accepted(tmp_path: Path, shards: int) -> None:
    folder = raw_checkpoint(shards).write(tmp_path)
    for stage in STAGES.values():
        stage(folder)
    assert len(summarize(folder).layers) == 2


def test_nothing_is_allocated_for_sizes_a_header_claims(tmp_path: Path) -> None:
    huge = [case for case in CASES if any(word in case.name for word in ("2^", "10^", "header length", "offsets"))]
    assert len(huge) > 10
    for number, case in enumerate(huge):
        folder = case.make(tmp_path / str(number))
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            read_header(folder / "model.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2_000_000, case.name


def test_no_flipped_header_bit_goes_unnoticed(tmp_path: Path) -> None:
    """One bit of every header byte: opening refuses it or sees the same tensors, and the hash catches the rest."""
    folder = raw_checkpoint().write(tmp_path)
    weights = folder / "model.safetensors"
    header, data = read_parts(weights)
    whole = Checkpoint.open(folder).files[0].tensors
    unnoticed = []
    for position in range(len(header)):
        flipped = bytearray(header)
        flipped[position] ^= 1 << (position % 8)
        write_parts(weights, bytes(flipped), data)
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError:
            continue
        assert checkpoint.files[0].tensors == whole, f"bit {position % 8} of header byte {position}"
        unnoticed.append(position)
        if len(unnoticed) % 8 == 1:
            with pytest.raises(HashMismatchError):
                checkpoint.check_hashes()
    metadata = len(json.dumps({"__metadata__": {"format": "pt"}}))
    assert all(position < metadata for position in unnoticed), "only metadata, which carries no meaning"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_random_damage_gives_a_named_error_or_a_valid_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    raw_checkpoint().write(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 40))
        content[position : position + cut] = data.draw(st.binary(max_size=40))
    weights.write_bytes(content)
    try:
        read_header(weights)
        checkpoint = Checkpoint.open(folder)
        checkpoint.linear(PATH)
        checkpoint.check_hashes()
    except CheckpointError:
        pass
    finally:
        shutil.rmtree(folder)


def test_unfinished_run_is_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial" / "result"
    folder.mkdir(parents=True)
    with pytest.raises(MissingFileError) as caught:
        Checkpoint.open(folder)
    assert "--resume" in caught.value.hint


def test_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    folder = raw_checkpoint().write(tmp_path)
    checkpoint = Checkpoint.open(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    for name in checkpoint.other_names:  # some of them were cut off, the others are no longer known to be whole
        with pytest.raises((errors.TruncatedFileError, errors.ChangedFileError), match=r"model\.safetensors"):
            checkpoint.other(name)
    weights.unlink()
    with pytest.raises(errors.UnreadableFileError, match=r"cannot read .*model\.safetensors"):
        checkpoint.linear(PATH)
