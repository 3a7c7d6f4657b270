"""Laws of the files: whatever is written is read back, by this package and by safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from safetensors import safe_open

from omniw4.checkpoint.header import read_header
from omniw4.checkpoint.reader import read_tensor
from omniw4.storage import TensorFileWriter, atomic_write_json
from omniw4.storage.files import without_nan

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)
SHAPE = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
LAYOUT = st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPE), max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@examples(60)
@given(layout=LAYOUT, metadata=st.dictionaries(NAMES, st.text(max_size=8), max_size=3), seed=st.integers(0, 2**31))
def test_tensors_come_back_bit_for_bit(
    folder: Path, layout: dict[str, Any], metadata: dict[str, str], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype)
        for name, (dtype, shape) in layout.items()
    }
    path = folder / "x.safetensors"
    metadata = {key.encode("utf-8", "replace").decode(): value for key, value in metadata.items()}
    with TensorFileWriter(path, layout, metadata) as writer:
        for name in sorted(tensors, reverse=True):
            writer.write(name, tensors[name])
    found = read_header(path)
    assert found.tensors.keys() == tensors.keys()
    assert found.metadata == metadata
    with safe_open(path, "pt") as library:
        for name, tensor in tensors.items():
            assert found.tensors[name].begin % tensor.element_size() == 0, "not aligned"
            for read in (read_tensor(found, name), library.get_tensor(name)):
                assert read.dtype == tensor.dtype
                assert torch.equal(read, tensor)
    assert [p.name for p in folder.iterdir()] == [path.name], "a temporary file is left"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@examples(60)
@given(value=JSON)
def test_json_comes_back_with_null_for_what_is_no_number(folder: Path, value: Any) -> None:
    path = folder / "x.json"
    atomic_write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == without_nan(value)
    assert _finite(without_nan(value))
    path.unlink()


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
