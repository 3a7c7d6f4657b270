"""Mutations of tensors: dtypes, shapes, ranges, names, values, whole files, and settings of another recipe.

Those that end in a consistent set of hashes are what a faulty writer would leave; the others are damage.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from mutation import Base, Mutation, entries, join_file, split_file, with_hashes

from omniw4 import errors
from omniw4.storage import ITEMSIZE

RANGES = (errors.TensorSizeError, errors.TensorOverlapError, errors.TensorGapError, errors.TruncatedFileError)
HUGE = (2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200)
WRONG = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def headers(base: Base) -> Iterator[Mutation]:
    """dtype, shape and byte range of every tensor, in the header alone."""
    for file, header, data in _weights(base):
        for name, entry in entries(header).items():
            begin, end = entry["data_offsets"]
            for dtype in (*ITEMSIZE, "F7", "f16", ""):
                if dtype != entry["dtype"]:
                    wanted = (errors.TensorDtypeError, errors.TensorSizeError, errors.UnknownDtypeError)
                    yield _edited(base, file, name, f"dtype {dtype!r}", wanted, dtype=dtype)
            for offsets in ([begin + 1, end], [begin, end - 1], [begin + 1, end + 1], [end, begin], [0, end - begin]):
                if offsets != [begin, end]:
                    yield _edited(base, file, name, f"at {offsets}", RANGES, data_offsets=offsets)
            for size in HUGE:
                sized = (errors.TensorSizeError,)
                yield _edited(base, file, name, f"shape [{size}]", sized, shape=[size])
                yield _edited(base, file, name, f"shape [{size}, {size}]", sized, shape=[size, size])
                grown = {"data_offsets": [begin, begin + size], "shape": [size], "dtype": "U8"}
                yield _edited(base, file, name, f"{size} bytes", (*RANGES, errors.TensorSizeError), **grown)
            for shape in (entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [end - begin], []):
                if shape != entry["shape"]:
                    wanted = (errors.TensorShapeError, errors.TensorSizeError)
                    yield _edited(base, file, name, f"shape {shape}", wanted, shape=shape)
            for other, entry2 in entries(header).items():
                if other > name and entry["data_offsets"] != entry2["data_offsets"]:
                    yield _swapped_ranges(base, file, header, data, name, other)


def consistent(base: Base) -> Iterator[Mutation]:
    """A tensor whose header, list and hashes agree on what the format does not allow, or that nothing needs."""
    for file, header, data in _weights(base):
        for name, entry in entries(header).items():
            if name.rpartition(".")[2] not in ("qweight", "w_scales", "row_scales", "proj_down", "proj_up", "smooth"):
                continue
            n_bytes = entry["data_offsets"][1] - entry["data_offsets"][0]
            for dtype, size in ITEMSIZE.items():
                if dtype == entry["dtype"] or n_bytes % size:
                    continue
                shape = entry["shape"] if size == ITEMSIZE[entry["dtype"]] else [n_bytes // size]
                kinds = (errors.TensorDtypeError, errors.TensorShapeError)
                yield _relisted(base, file, header, data, name, f"as {dtype}{shape}", kinds, dtype=dtype, shape=shape)
            for shape in ([n_bytes // ITEMSIZE[entry["dtype"]]], entry["shape"][::-1], [1, *entry["shape"]]):
                if shape != entry["shape"]:
                    kind = (errors.TensorShapeError,)
                    yield _relisted(base, file, header, data, name, f"as {shape}", kind, shape=shape)


def values(base: Base, count: int) -> Iterator[Mutation]:
    """NaN, inf and wrong signs in any scale or float of a linear; hashes are right, so only reading can notice."""
    rng = random.Random(5)
    owned = tuple(f"{path}." for path in base.specs)
    places = [
        (file, header, data, name, entry["dtype"], entry["data_offsets"])
        for file, header, data in _weights(base)
        for name, entry in entries(header).items()
        if (name.startswith(owned) and entry["dtype"] in ("F16", "F32")) or name.endswith(".w_scales")
    ]
    for _ in range(count):
        file, header, data, name, dtype, (begin, end) = rng.choice(places)
        size = ITEMSIZE[dtype]
        position = begin + size * rng.randrange((end - begin) // size)
        title, value = rng.choice(list(WRONG.items()))
        error: tuple[type[errors.CheckpointError], ...] = (errors.NonFiniteTensorError,)
        if dtype == "U8":
            title, raw, error = "too large", bytes([rng.randrange(17, 256)]), (errors.ScaleValueError,)
        else:
            if name.endswith((".w_scales", ".row_scales", ".smooth")) and rng.random() < 0.3:
                title, value, error = "negative", -(2.0 ** -rng.randrange(15)), (errors.ScaleValueError,)
            raw = struct.pack("<e" if dtype == "F16" else "<f", value)
        changed = data[:position] + raw + data[position + size :]
        files = with_hashes(base, {file: join_file(header, changed)})
        yield Mutation(f"{name}: {title} at byte {position - begin}", files, error)


def damaged_data(base: Base, count: int) -> Iterator[Mutation]:
    """Nibbles swapped, rows exchanged, bytes rotated, a tensor's bytes another's: valid numbers, told by the hash."""
    rng = random.Random(6)
    damages: dict[str, Callable[[bytes], bytes]] = {
        "nibbles swapped": lambda b: bytes((x << 4 | x >> 4) & 0xFF for x in b),
        "halves exchanged": lambda b: b[len(b) // 2 :] + b[: len(b) // 2],
        "reversed": lambda b: b[::-1],
        "zeroed": lambda b: bytes(len(b)),
    }
    kinds = (errors.HashMismatchError, errors.NonFiniteTensorError, errors.ScaleValueError)
    weights = _weights(base)
    for _ in range(count):
        file, header, data = rng.choice(weights)
        name, entry = rng.choice(list(entries(header).items()))
        begin, end = entry["data_offsets"]
        left = rng.randrange(begin, end)
        right = rng.choice((end, rng.randint(left + 1, end)))
        title, damage = rng.choice(list(damages.items()))
        changed = data[:left] + damage(data[left:right]) + data[right:]
        if changed != data:
            files: dict[str, bytes | None] = {file: join_file(header, changed)}
            yield Mutation(f"{name}: bytes {left - begin} to {right - begin} {title}", files, kinds)


def files(base: Base) -> Iterator[Mutation]:
    """Files deleted, emptied, exchanged, copied over each other."""
    for name in base.files:
        gone = (errors.MissingFileError, errors.MissingShardError)
        yield Mutation(f"{name} deleted", {name: None}, gone)
        yield Mutation(f"{name} empty", {name: b""}, (errors.MalformedJsonError, errors.TruncatedFileError))
        for other in base.files:
            if other != name:
                yield Mutation(f"{name} is a copy of {other}", {name: base.files[other]}, _REFUSED)
                exchanged: dict[str, bytes | None] = {name: base.files[other], other: base.files[name]}
                yield Mutation(f"{name} and {other} exchanged", exchanged, _REFUSED)


def other_recipes(base: Base) -> Iterator[Mutation]:
    """quantization_config of another, valid recipe: each setting, for all linears and for one."""
    config = json.loads(base.files["config.json"])
    settings: dict[str, tuple[Any, ...]] = {
        "act_bits": (4, 8, 16),
        "act_clip": (1.0, 0.5, 0.94, 1, 1e-300),
        "rank": (0, 8, 16, 32, 256),
        "rotation": ("none", "hadamard64"),
        "smooth": (True, False),
        "scale_type": ("float16", "integer"),
    }
    for key, options in settings.items():
        for value in options:
            for path in (None, *config["quantization_config"]["modules"]):
                changed = copy.deepcopy(config)
                inside = changed["quantization_config"]
                if path is not None:
                    inside = inside["modules"]
                    inside[path] = {**(inside[path] if isinstance(inside[path], dict) else {}), key: value}
                else:
                    inside[key] = value
                if changed != config:
                    text = json.dumps(changed).encode()
                    yield Mutation(f"{path or 'all'}: {key} {value!r}", {"config.json": text})


_REFUSED = tuple(
    e
    for e in vars(errors).values()
    if isinstance(e, type) and issubclass(e, errors.CheckpointError) and e is not errors.CheckpointError
)


def _weights(base: Base) -> list[tuple[str, bytes, bytes]]:
    return [(name, *split_file(base.files[name])) for name in base.weight_files]


def _edited(base: Base, file: str, name: str, title: str, wanted: tuple[type, ...], **changes: Any) -> Mutation:
    header, data = split_file(base.files[file])
    document = json.loads(header)
    document[name].update(changes)
    return Mutation(f"{file}: {name} {title}", {file: join_file(document, data)}, wanted)


def _relisted(
    base: Base, file: str, header: bytes, data: bytes, name: str, title: str, wanted: tuple[type, ...], **changes: Any
) -> Mutation:
    document, manifest = json.loads(header), json.loads(base.files["omniw4.json"])
    document[name].update(changes)
    entry = document[name]
    manifest["tensors"][name] = f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"
    changed = {file: join_file(document, data), "omniw4.json": json.dumps(manifest).encode()}
    return Mutation(f"{name} {title} everywhere", with_hashes(base, changed), wanted)


def _swapped_ranges(base: Base, file: str, header: bytes, data: bytes, name: str, other: str) -> Mutation:
    """Two tensors that point at each other's bytes: refused by size, or, where the sizes agree, by the hash."""
    document = json.loads(header)
    a, b = document[name], document[other]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    kinds = (errors.TensorSizeError, errors.HashMismatchError, errors.NonFiniteTensorError, errors.ScaleValueError)
    return Mutation(f"{file}: {name} and {other} exchanged", {file: join_file(document, data)}, kinds)
