"""Tensors that are missing, unknown, of the wrong kind, or hold what they must not."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile_case import INF, NAN, NORM, Case
from raw_checkpoint import (
    PATH,
    PLAIN,
    RawCheckpoint,
    raw_checkpoint,
    read_parts,
    write_parts,
    zeros,
)

from omniw4 import errors


def wrong_tensors() -> Iterator[Case]:
    """Written and listed consistently, but not what the format wants of a linear."""
    dtypes = {
        "qweight": zeros("I8", 24, 96),
        "w_scales": zeros("F32", 24, 3),
        "proj_down": zeros("F32", 192, 16),
        "proj_up": zeros("BF16", 24, 16),
        "smooth": zeros("BF16", 192),
        "bias": zeros("F64", 24),
    }
    for part, tensor in {**dtypes, "w_scales ": zeros("BF16", 24, 3)}.items():
        yield _tensor_case(errors.TensorDtypeError, part.strip(), tensor)
    shapes = {
        "qweight": [zeros("U8", 24 * 96), zeros("U8", 24, 48), zeros("U8", 24, 80), zeros("U8", 0, 96), zeros("U8")],
        "w_scales": [zeros("F16", 24, 6), zeros("F16", 3, 24), zeros("F16", 24), zeros("F16", 25, 3)],
        "proj_down": [zeros("F16", 16, 192), zeros("F16", 192, 32), zeros("F16", 192)],
        "proj_up": [zeros("F16", 16, 24), zeros("F16", 24, 8)],
        "smooth": [zeros("F16", 192, 1), zeros("F16", 24)],
        "bias": [zeros("F16", 192), zeros("F16", 1, 24), zeros("F16")],
    }
    for part, tensors in shapes.items():
        for tensor in tensors:
            # a qweight of another valid shape makes the tensors beside it wrong
            mentions = (PATH,) if part == "qweight" else (f"{PATH}.{part}",)
            yield _tensor_case(errors.TensorShapeError, part, tensor, mentions)
    yield Case(
        "shape differs from omniw4.json",
        errors.TensorShapeError,
        (NORM, "BF16[8,8]", "BF16[64]"),
        before=lambda raw: raw.listed.update({NORM: "BF16[8,8]"}),
    )
    yield Case(
        "dtype differs from omniw4.json",
        errors.TensorDtypeError,
        (NORM, "F16[64]", "BF16[64]"),
        before=lambda raw: raw.listed.update({NORM: "F16[64]"}),
    )


def missing_and_extra() -> Iterator[Case]:
    for shards in (1, 3):
        for name in raw_checkpoint().tensors:
            yield Case(
                f"{name} missing of {shards}",
                errors.MissingTensorError,
                (name,),
                before=lambda raw, name=name: raw.absent.add(name),
                shards=shards,
            )
            yield Case(
                f"{name} renamed of {shards}",
                errors.RenamedTensorError,
                (name, f"{name}_v2"),
                before=lambda raw, name=name: _rename(raw, name),
                shards=shards,
            )
    for part in ("qweight", "w_scales", "proj_down", "proj_up", "smooth"):
        yield Case(
            f"{part} neither there nor listed",
            errors.MissingTensorError,
            (f"{PATH}.{part}",),
            before=lambda raw, part=part: raw.tensors.pop(f"{PATH}.{part}"),
        )
    yield Case(
        "tensor that is not listed",
        errors.UnexpectedTensorError,
        ("model.extra.weight",),
        before=lambda raw: (
            raw.tensors.update({"model.extra.weight": zeros("F16", 3)}),
            raw.unlisted.add("model.extra.weight"),
        ),
    )
    for name, tensor in {
        f"{PATH}.weight": zeros("F16", 24, 192),
        f"{PLAIN}.proj_up": zeros("F16", 8, 16),
        f"{PLAIN}.smooth": zeros("F16", 128),
        "model.other.qweight": zeros("U8", 8, 32),
        "lm_head.w_scales": zeros("F16", 5, 1),
    }.items():
        yield Case(
            f"{name} where none may be",
            errors.UnexpectedTensorError,
            (name,),
            before=lambda raw, name=name, tensor=tensor: raw.tensors.update({name: tensor}),
        )


def values() -> Iterator[Case]:
    """Numbers that no quantizer writes; the hashes are right, so only reading can notice."""
    for part in ("w_scales", "proj_down", "proj_up", "smooth", "bias"):
        for title, bits in (("NaN", NAN), ("-inf", INF)):
            yield Case(
                f"{title} in {part}",
                errors.NonFiniteTensorError,
                (f"{PATH}.{part}", "[1"),
                before=lambda raw, part=part, bits=bits: _set_element(raw, f"{PATH}.{part}", 1, bits),
                stage="read",
            )
    negative = struct.pack("<e", -1.0)
    for part, bits in (("w_scales", negative), ("smooth", negative), ("smooth", bytes(2))):
        yield Case(
            f"{part} is {struct.unpack('<e', bits)[0]}",
            errors.ScaleValueError,
            (f"{PATH}.{part}",),
            before=lambda raw, part=part, bits=bits: _set_element(raw, f"{PATH}.{part}", 1, bits),
            stage="read",
        )


def flipped_data() -> Iterator[Case]:
    for shards in (1, 3):
        for name in raw_checkpoint().tensors:
            yield Case(
                f"a bit of {name} flipped, {shards} files",
                errors.HashMismatchError,
                ("model",),
                after=lambda folder, name=name: _flip(folder, name),
                stage="hash",
                shards=shards,
            )


def _tensor_case(error: type, part: str, tensor: Any, mentions: tuple[str, ...] = ()) -> Case:
    return Case(
        f"{part} {tensor[0]}{tensor[1]}",
        error,
        mentions or (f"{PATH}.{part}", tensor[0]),
        before=lambda raw: raw.tensors.update({f"{PATH}.{part}": tensor}),
    )


def _rename(raw: RawCheckpoint, name: str) -> None:
    """In the file, not in the manifest."""
    raw.tensors[f"{name}_v2"] = raw.tensors[name]
    raw.unlisted.add(f"{name}_v2")
    raw.absent.add(name)


def _set_element(raw: RawCheckpoint, name: str, index: int, bits: bytes) -> None:
    dtype, shape, data = raw.tensors[name]
    width = len(data) // max(1, _count(shape))
    row = index * (_count(shape[1:]) if len(shape) > 1 else 1)
    raw.tensors[name] = (dtype, shape, data[: row * width] + bits + data[(row + 1) * width :])


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _flip(folder: Path, name: str) -> None:
    for path in sorted(folder.glob("model*.safetensors")):
        header, data = read_parts(path)
        entry = json.loads(header).get(name)
        if entry:
            middle = sum(entry["data_offsets"]) // 2
            write_parts(path, header, data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
