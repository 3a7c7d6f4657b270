"""A safetensors file written one tensor at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from omniw4.errors import StorageError
from omniw4.storage.files import explain_os_errors, replacing

# torch dtype (its str, without "torch.") -> (safetensors name, bytes)
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "complex64": ("C64", 8),
}
ITEMSIZE: dict[str, int] = dict(DTYPES.values())
_MAX_HEADER = 100_000_000  # the limit of the safetensors library


def dtype_name(dtype: Any) -> str:
    """Safetensors name (``"F16"``) of a torch dtype or of a name already in that form.

    Raises:
        StorageError: safetensors has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name in ITEMSIZE:
        return name
    if name not in DTYPES:
        raise StorageError(f"dtype {name} cannot be stored in a safetensors file; one of {', '.join(DTYPES)} can")
    return DTYPES[name][0]


def told_sizes(path: str | Path) -> str:
    """``1000 bytes found, 7576 expected``: of a file that does not open, as far as its header can be read."""
    found = "size unknown"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = f"{size} bytes found"
            prefix = file.read(8)
            end = 8 + int.from_bytes(prefix, "little") if len(prefix) == 8 else 8
            if end > size:
                return f"{found}, at least {end} expected" if end <= _MAX_HEADER else found
            header = json.loads(file.read(end - 8))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return f"{found}, {end + int(max(ends, default=0))} expected"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return found


class TensorFileWriter:
    """Writes a safetensors file one tensor at a time: the header first, so peak memory is one tensor.

    Offsets follow the order of ``layout``, wider dtypes first so that every tensor is aligned. Tensors may be
    written in any order, each exactly once; the file appears under its name when the ``with`` block ends well.

    Args:
        path: the file to write.
        layout: name -> (torch dtype or safetensors name, shape).
        metadata: the header's ``__metadata__``; keys are sorted, so equal content gives equal bytes.

    Raises:
        StorageError: the disk, the folder's permissions, or a dtype that cannot be stored.
        ValueError: a tensor that is not in the layout, does not match it, was written twice or was left out.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Mapping[str, tuple[Any, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._layout = {name: (dtype_name(dtype), tuple(map(int, shape))) for name, (dtype, shape) in layout.items()}
        self._ranges: dict[str, tuple[int, int]] = {}
        header: dict[str, Any] = {}
        if metadata:
            header["__metadata__"] = {key: metadata[key] for key in sorted(metadata)}
        offset = 0
        for name in sorted(self._layout, key=lambda n: -ITEMSIZE[self._layout[n][0]]):  # stable
            dtype, shape = self._layout[name]
            end = offset + tensor_bytes(dtype, shape)
            self._ranges[name] = (offset, end)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._prefix = struct.pack("<Q", len(encoded)) + encoded
        self._missing = set(self._layout)
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> TensorFileWriter:
        with contextlib.ExitStack() as stack:  # a header that cannot be written leaves no temporary file either
            self._file = stack.enter_context(replacing(self.path))
            with explain_os_errors("write", self.path):
                self._file.write(self._prefix)
            self._stack = stack.pop_all()
        return self

    def write(self, name: str, tensor: Any) -> None:
        """Write one torch tensor, of any device and strides, of the dtype and shape in the layout."""
        found = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if name in self._layout and found != self._layout[name]:
            raise ValueError(f"{self.path.name}: tensor {name!r} is {found}, the layout says {self._layout[name]}")
        self.write_bytes(name, [_bytes_of(tensor)])

    def write_bytes(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write one tensor from its little-endian, row-major bytes."""
        if self._file is None:
            raise ValueError(f"{self.path.name}: write inside a with block")
        if name not in self._missing:
            state = "was written already" if name in self._layout else "is not in the layout"
            raise ValueError(f"{self.path.name}: tensor {name!r} {state}")
        begin, end = self._ranges[name]
        with explain_os_errors("write", self.path):
            self._file.seek(len(self._prefix) + begin)
            for chunk in chunks:
                begin += self._file.write(chunk)
        if begin != end:
            raise ValueError(f"{self.path.name}: tensor {name!r} got {begin - end:+d} bytes against its layout")
        self._missing.remove(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file = None
        if error is None and self._missing:
            error = ValueError(f"{self.path.name}: tensors never written: {', '.join(sorted(self._missing))}")
            self._stack.__exit__(type(error), error, None)
            raise error
        self._stack.__exit__(kind, error, trace)


def sha256_tensors(tensors: Iterable[Any]) -> str:
    """Of the bytes of torch tensors as they are stored, one after the other; hexadecimal."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(_bytes_of(tensor))
    return total.hexdigest()


def _bytes_of(tensor: Any) -> memoryview:
    """Little-endian, row-major, of a torch tensor of any device and strides."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor given its safetensors dtype and shape."""
    size = ITEMSIZE[dtype]
    for length in shape:
        size *= length
    return size
