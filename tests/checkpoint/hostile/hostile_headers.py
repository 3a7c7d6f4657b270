"""Tensor files whose header, length or byte ranges are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_case import NORM, SCALES, WEIGHTS, Case
from raw_checkpoint import (
    edit_header,
    raw_checkpoint,
    read_parts,
    write_parts,
    zeros,
)

from omniw4 import errors


def truncations() -> Iterator[Case]:
    """The file ends at, before and after every boundary of its structure."""
    header, data = _valid_parts()
    starts = {entry["data_offsets"][0] for name, entry in json.loads(header).items() if name != "__metadata__"}
    cuts = {0, 1, 7, 8, 9, 8 + len(header) // 2, 8 + len(header) - 1}
    cuts |= {8 + len(header) + start + d for start in starts for d in (-1, 0, 1)} | {8 + len(header) + len(data) - 1}
    for cut in sorted(cuts):
        yield Case(
            f"truncated to {cut} bytes",
            errors.TruncatedFileError,
            (WEIGHTS, f"holds {cut} bytes"),
            after=lambda folder, cut=cut: _truncate(folder / WEIGHTS, cut),
        )


def lengths() -> Iterator[Case]:
    for extra in (1, 8, 4096):
        yield Case(
            f"{extra} bytes appended",
            errors.TrailingDataError,
            (WEIGHTS,),
            after=lambda folder, extra=extra: _append(folder / WEIGHTS, bytes(extra)),
        )
    for length in (100_000_001, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
        yield Case(
            f"header length {length}",
            errors.MalformedHeaderError,
            (WEIGHTS, str(length)),
            after=lambda folder, length=length: _set_length(folder / WEIGHTS, lambda _: length),
        )
    for shift in (-1, 1, -100):
        yield Case(
            f"header length off by {shift}",
            errors.MalformedHeaderError,
            (WEIGHTS,),
            after=lambda folder, shift=shift: _set_length(folder / WEIGHTS, lambda n: n + shift),
        )
    yield Case(
        "header length beyond the end",
        errors.TruncatedFileError,
        (WEIGHTS,),
        after=lambda folder: _set_length(folder / WEIGHTS, lambda _: (folder / WEIGHTS).stat().st_size - 7),
    )


def malformed_headers() -> Iterator[Case]:
    raw: dict[str, bytes] = {
        "empty": b"",
        "no JSON": b"{]",
        "leading space": b" {}",
        "list": b"[]",
        "not UTF-8": b'{"\xff": 1}',
        "deep": b'{"a":' * 200_000,
        "key twice": b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": {}}',
        "number of 10^5 digits": b'{"a": {"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,1]}}',
        "two values": b"{}{}",
    }
    for name, header in raw.items():
        yield Case(
            f"header: {name}",
            errors.MalformedHeaderError,
            (WEIGHTS,),
            after=lambda folder, header=header: write_parts(folder / WEIGHTS, header, read_parts(folder / WEIGHTS)[1]),
        )
    entries: dict[str, Any] = {
        "entry is a list": [],
        "entry is null": None,
        "no dtype": {"shape": [64], "data_offsets": [0, 128]},
        "extra key": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128], "strides": [1]},
        "dtype is a number": {"dtype": 3, "shape": [64], "data_offsets": [0, 128]},
        "negative shape": {"dtype": "BF16", "shape": [-64], "data_offsets": [0, 128]},
        "float shape": {"dtype": "BF16", "shape": [64.0], "data_offsets": [0, 128]},
        "boolean shape": {"dtype": "BF16", "shape": [64, True], "data_offsets": [0, 128]},
        "shape is a string": {"dtype": "BF16", "shape": "64", "data_offsets": [0, 128]},
        "three offsets": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 64, 128]},
        "negative offset": {"dtype": "BF16", "shape": [64], "data_offsets": [-128, 0]},
    }
    for name, entry in entries.items():
        yield _header_case(name, errors.MalformedHeaderError, lambda _, entry=entry: entry)
    for name, metadata in {"metadata is a list": [], "metadata of numbers": {"a": 1}}.items():
        yield Case(
            f"header: {name}",
            errors.MalformedHeaderError,
            (WEIGHTS, "__metadata__"),
            after=lambda folder, m=metadata: edit_header(folder / WEIGHTS, lambda h: h.update(__metadata__=m)),
        )
    for dtype in ("F17", "", "f16", "BF16 ", "x" * 10_000):
        yield _header_case(
            f"dtype {dtype[:5]!r}", errors.UnknownDtypeError, lambda e, dtype=dtype: {**e, "dtype": dtype}
        )


def wrong_sizes() -> Iterator[Case]:
    shapes: dict[str, list[int]] = {
        "one more": [65],
        "one less": [63],
        "zero": [0],
        "scalar": [],
        "2^63 elements": [2**63],
        "product wraps to 64 in 64 bits": [2**32, 2**32, 64],
        "product wraps to 0": [2**62, 4],
        "10^4000": [10**4000],
        "65 dimensions": [1] * 64 + [64],
    }
    for name, shape in shapes.items():
        yield _header_case(f"shape {name}", errors.TensorSizeError, lambda e, shape=shape: {**e, "shape": shape})
    for name, move in {
        "reversed": lambda b, e: [e, b],
        "end beyond 2^63": lambda b, e: [b, 2**63 + e],
        "end at 10^300": lambda b, e: [b, 10**300],
        "one byte short": lambda b, e: [b, e - 1],
    }.items():
        yield _header_case(
            f"offsets {name}",
            errors.TensorSizeError,
            lambda entry, move=move: {**entry, "data_offsets": move(*entry["data_offsets"])},
        )
    yield _header_case(
        "offsets far behind the end",
        errors.TruncatedFileError,
        lambda entry: {**entry, "data_offsets": [o + 2**40 for o in entry["data_offsets"]]},
        mentions=(WEIGHTS,),
    )
    yield Case(
        "two tensors at one place",
        errors.TensorOverlapError,
        (WEIGHTS, NORM),
        after=lambda folder: edit_header(folder / WEIGHTS, lambda h: h["z"].update(h[NORM])),
        before=lambda raw: raw.tensors.update(z=raw.tensors[NORM]),
    )
    yield _header_case(
        "a tensor one byte into its neighbour",
        errors.TensorOverlapError,
        lambda entry: {**entry, "data_offsets": [o - 1 for o in entry["data_offsets"]]},
    )
    yield Case(
        "bytes of no tensor between two",
        errors.TensorGapError,
        (WEIGHTS,),
        after=lambda folder: edit_header(folder / WEIGHTS, lambda h: h.pop(SCALES.replace("w_scales", "smooth"))),
    )
    yield Case(
        "bytes of no tensor at the start",
        errors.TensorGapError,
        (WEIGHTS, "lm_head.weight"),
        before=lambda raw: raw.tensors.update({"a": zeros("U8", 3)}),
        after=lambda folder: edit_header(folder / WEIGHTS, lambda h: h.pop("a")),
    )


def _valid_parts() -> tuple[bytes, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_parts(raw_checkpoint().write(Path(folder)) / WEIGHTS)


def _header_case(
    name: str,
    error: type[errors.CheckpointError],
    change: Callable[[dict[str, Any]], Any],
    mentions: tuple[str, ...] = (WEIGHTS, NORM),
) -> Case:
    """The last tensor's entry changed."""
    return Case(
        f"header: {name}",
        error,
        mentions,
        after=lambda folder: edit_header(folder / WEIGHTS, lambda h: h.update({NORM: change(h[NORM])})),
    )


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def _set_length(path: Path, change: Callable[[int], int]) -> None:
    header, data = read_parts(path)
    write_parts(path, header, data, change(len(header)))
