"""Headers of safetensors files, checked before anything is allocated. Imports no torch.

Every number in a header is untrusted: sizes are Python integers, so products do not overflow, and each is compared
with the size of the file before it is used.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniw4.errors import (
    ChangedFileError,
    MalformedHeaderError,
    MissingFileError,
    TensorGapError,
    TensorOverlapError,
    TensorSizeError,
    TrailingDataError,
    TruncatedFileError,
    UnknownDtypeError,
    UnreadableFileError,
)
from omniw4.storage import ITEMSIZE
from omniw4.storage.files import Stamp, stamp_of

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_BYTES = 2**63 - 1
MAX_DIMENSIONS = 64
CHUNK = 4 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``begin`` and ``end`` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


@dataclass(frozen=True)
class TensorFile:
    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    nbytes: int
    stamp: Stamp | None = None  # when its header was read; None: not compared

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes, at most 4 MiB at a time.

        Raises:
            TruncatedFileError: the file became shorter since its header was read.
            ChangedFileError: it was replaced or written to; what was handed out before is of no use.
            UnreadableFileError: the operating system refuses.
        """
        info = self.tensors[name]
        try:
            with open(self.path, "rb") as file:
                file.seek(info.begin)
                left = info.nbytes
                while left:
                    chunk = file.read(min(left, CHUNK))
                    if not chunk:
                        raise TruncatedFileError(
                            f"{self.path.name}: tensor {name!r} ends at byte {info.end}, the file {left} bytes earlier"
                        )
                    left -= len(chunk)
                    yield chunk
                if self.stamp not in (None, stamp_of(os.fstat(file.fileno()))):
                    raise changed(self.path)
        except OSError as e:
            raise UnreadableFileError(f"cannot read {str(self.path)!r}: {e.strerror or e}") from e


def changed(path: Path) -> ChangedFileError:
    return ChangedFileError(
        f"{str(path)!r} was replaced or written to while it was read",
        hint="start again when nothing writes into its folder any more",
    )


def describe(dtype: str, shape: tuple[int, ...] | list[int]) -> str:
    """``F16[24,192]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def read_header(path: str | Path) -> TensorFile:
    """Read and check a safetensors header; no tensor data is read.

    Raises:
        MissingFileError, UnreadableFileError, TruncatedFileError, TrailingDataError, MalformedHeaderError,
        UnknownDtypeError, TensorSizeError, TensorOverlapError, TensorGapError: see their docstrings.
    """
    path = Path(path)
    try:
        check_regular(path)
        with open(path, "rb") as file:
            opened = os.fstat(file.fileno())
            size = opened.st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise TruncatedFileError(
                    f"{path.name} holds {size} bytes, wanted at least 8 for the length of its header",
                    hint="copy or download the file again",
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise MalformedHeaderError(
                    f"{path.name} declares a header of {length} bytes, more than the allowed {MAX_HEADER_BYTES}"
                )
            if 8 + length > size:
                raise TruncatedFileError(
                    f"{path.name} holds {size} bytes, wanted at least {8 + length} for its header",
                    hint="copy or download the file again",
                )
            raw = file.read(length)
    except FileNotFoundError as e:
        raise MissingFileError(f"no file {str(path)!r}") from e
    except OSError as e:
        raise UnreadableFileError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    header = _parse(path.name, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedHeaderError(f"{path.name}: __metadata__ is not a mapping of strings")
    start = 8 + length
    tensors = {name: _parse_tensor(path.name, name, entry, start) for name, entry in header.items()}
    _check_ranges(path.name, tensors, start, size)
    return TensorFile(path, tensors, metadata, size, stamp_of(opened))


def check_regular(path: Path) -> None:
    """Raise OSError unless this is a file: a pipe would block for ever, a device never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "it is no regular file")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no key occurs twice: of two values, each reader would take the one it likes.

    Raises:
        ValueError: naming the first key that occurs again.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} occurs twice")
        found[key] = value
    return found


def _parse(file: str, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise MalformedHeaderError(f"{file}: the header begins with {raw[:1]!r}, wanted b'{{'")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        raise MalformedHeaderError(f"{file}: the header is not valid JSON: {e}") from e
    if not isinstance(header, dict):
        raise MalformedHeaderError(f"{file}: the header holds a {type(header).__name__}, wanted a mapping")
    return header


def _parse_tensor(file: str, name: str, entry: Any, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedHeaderError(f"{file}: tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise MalformedHeaderError(
            f"{file}: tensor {name!r} has an ill-formed dtype, shape or data_offsets: "
            f"{str(dtype)[:20]!r}, {str(shape)[:60]}, {str(offsets)[:60]}"
        )
    if dtype not in ITEMSIZE:
        raise UnknownDtypeError(f"{file}: tensor {name!r} has the unknown dtype {dtype[:20]!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise TensorSizeError(f"{file}: tensor {name!r} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} can be")
    wanted = ITEMSIZE[dtype]
    for dimension in shape:
        wanted *= dimension
    begin, end = offsets
    if begin > end or end > MAX_BYTES or wanted > MAX_BYTES or end - begin != wanted:
        raise TensorSizeError(
            f"{file}: tensor {name!r} {describe(dtype, shape)[:80]} needs {_short(wanted)} bytes, "
            f"its data_offsets [{_short(begin)}, {_short(end)}] hold {_short(end - begin)}"
        )
    return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def _check_ranges(file: str, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Together the tensors must cover the file's data exactly once."""
    expected = max((info.end for info in tensors.values()), default=start)
    if size < expected:
        raise TruncatedFileError(
            f"{file} holds {size} bytes, its header says {expected}", hint="copy or download the file again"
        )
    covered, before = start, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin < covered:
            raise TensorOverlapError(f"{file}: tensors {before!r} and {name!r} share bytes {info.begin} to {covered}")
        if info.begin > covered:
            raise TensorGapError(f"{file}: bytes {covered} to {info.begin} before tensor {name!r} belong to no tensor")
        covered, before = info.end, name
    if size > expected:
        raise TrailingDataError(f"{file} holds {size} bytes, its header says {expected}")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(number: int) -> str:
    return str(number) if abs(number) <= MAX_BYTES else "more than 2^63"
