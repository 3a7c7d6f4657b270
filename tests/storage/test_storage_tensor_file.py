"""Safetensors files written one tensor at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from storage_helpers import run_script

from omniw4.errors import StorageError
from omniw4.storage import (
    TensorFileWriter,
)

TENSORS = {
    "half": torch.randn(3, 5).half(),
    "double": torch.randn(2).double(),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "brain": torch.randn(7).bfloat16(),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "größe": torch.ones(1),
}
LAYOUT = {name: (t.dtype, t.shape) for name, t in TENSORS.items()}


@pytest.mark.parametrize("order", [list(TENSORS), list(reversed(TENSORS))], ids=["in order", "backwards"])
def test_tensor_file_reads_back(tmp_path: Path, order: list[str]) -> None:
    path = tmp_path / "x.safetensors"
    with TensorFileWriter(path, LAYOUT, {"format": "pt", "a": "b"}) as writer:
        for name in order:
            writer.write(name, TENSORS[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "b"}
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_tensor_file_is_aligned_and_always_the_same(tmp_path: Path) -> None:
    for number, order in enumerate([list(TENSORS), list(reversed(TENSORS))]):
        with TensorFileWriter(
            tmp_path / str(number), LAYOUT, {"b": "1", "a": "2"} if number else {"a": "2", "b": "1"}
        ) as w:
            for name in order:
                w.write(name, TENSORS[name])
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    raw = (tmp_path / "0").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_strided_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "t": base.T,
        "step": base[:, ::2],
        "wide": base[:1].expand(3, 6),
        "grad": torch.ones(2, requires_grad=True),
    }
    with TensorFileWriter(tmp_path / "x", {n: (t.dtype, t.shape) for n, t in views.items()}) as writer:
        for name, tensor in views.items():
            writer.write(name, tensor)
    found = load_file(tmp_path / "x")
    for name, tensor in views.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda w: w.write("b", torch.ones(3)), "'b' is not in the layout"),
        (lambda w: w.write("a", torch.ones(4)), "'a' is"),
        (lambda w: w.write("a", torch.ones(3).half()), "'a' is"),
        (lambda w: (w.write("a", torch.ones(3)), w.write("a", torch.ones(3))), "'a' was written already"),
        (lambda w: w.write_bytes("a", [b"123"]), "got -9 bytes"),
        (lambda w: w.write_bytes("a", [b"1" * 13]), r"got \+1 bytes"),
        (lambda w: None, "never written: a"),
    ],
)
def test_misuse_of_a_tensor_file_leaves_nothing(tmp_path: Path, misuse: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message), TensorFileWriter(tmp_path / "x", {"a": ("F32", [3])}) as writer:
        misuse(writer)
    assert list(tmp_path.iterdir()) == []


def test_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="dtype complex128 cannot be stored"):
        TensorFileWriter(tmp_path / "x", {"a": (torch.complex128, [1])})


def test_writing_needs_the_memory_of_one_chunk(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        from omniw4.storage import TensorFileWriter
        def peak():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        with TensorFileWriter(sys.argv[1], {f"t{i}": ("U8", [8 << 20]) for i in range(8)}) as w:
            for i in range(8):
                w.write_bytes(f"t{i}", (bytes(1 << 20) for _ in range(8)))
        print(peak() - before)
        """,
        tmp_path / "x",
    )
    assert int(done.stdout) < 8 * 1024, f"{done.stdout} KiB above the start for a file of 64 MiB {done.stderr}"


def test_a_header_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though whoever caught the error still holds it, and with it everything that was alive when it rose."""
    from omniw4.storage import files

    class FullDisk:
        def __init__(self, path: Path, mode: str) -> None:
            self._file = open(path, mode)  # noqa: SIM115

        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

    monkeypatch.setattr(files, "open", FullDisk, raising=False)
    with pytest.raises(StorageError, match="No space left") as caught, TensorFileWriter(tmp_path / "x", LAYOUT):
        pass
    assert caught.value.__traceback__ is not None
    assert list(tmp_path.iterdir()) == []
