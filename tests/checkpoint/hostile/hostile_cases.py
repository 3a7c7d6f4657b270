"""Every way a checkpoint can be wrong: how to make it so, and the error that must say so.

A case changes a valid checkpoint either before it is written, so that it is wrong and consistent with itself, or
afterwards, in its files. ``stage`` says what must notice: opening it, reading its linears, or comparing hashes.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raw_checkpoint import (
    PATH,
    PLAIN,
    RawCheckpoint,
    edit_header,
    edit_json,
    raw_checkpoint,
    read_parts,
    write_parts,
    zeros,
)

from omniw4 import errors

Q, SCALES, NORM = f"{PATH}.qweight", f"{PATH}.w_scales", "model.norm.weight"
WEIGHTS, INDEX, MANIFEST, CONFIG = "model.safetensors", "model.safetensors.index.json", "omniw4.json", "config.json"
NAN, INF = struct.pack("<H", 0x7E00), struct.pack("<H", 0xFC00)


@dataclass(frozen=True)
class Case:
    name: str
    error: type[errors.CheckpointError]
    mentions: tuple[str, ...]  # what the message must name
    before: Callable[[RawCheckpoint], Any] = lambda raw: None
    after: Callable[[Path], Any] = lambda folder: None
    stage: Literal["open", "read", "hash"] = "open"
    shards: int = 1

    def make(self, folder: Path) -> Path:
        raw = raw_checkpoint(self.shards)
        self.before(raw)
        raw.write(folder)
        self.after(folder)
        return folder


def all_cases() -> list[Case]:
    generators = (
        truncations,
        lengths,
        malformed_headers,
        wrong_sizes,
        wrong_tensors,
        missing_and_extra,
        configs,
        indexes,
        manifests,
        files,
        values,
        flipped_data,
    )
    return [case for generator in generators for case in generator()]


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


def configs() -> Iterator[Case]:
    for version in (0, 2, -1, "1", 1.0, None, True, [1]):
        yield _config_case(f"format_version {version!r}", errors.FormatVersionError, format_version=version)
    for method in ("gptq", None, 4):
        yield _config_case(f"quant_method {method!r}", errors.QuantMethodError, quant_method=method)
    for other in (None, [], "omniw4"):
        yield Case(
            f"quantization_config {other!r}",
            errors.QuantMethodError,
            ("quantization_config",),
            before=lambda raw, other=other: raw.config.update(quantization_config=other),
        )
    wrong: dict[str, list[Any]] = {
        "weight_bits": [8, "4", None, True],
        "act_bits": [5, 4.0, None],
        "act_clip": [0, -1, 1.5, "0.9", True],
        "group_size": [128, 0, "64"],
        "rank": [-1, 257, 16.0, None, True],
        "rotation": ["hadamard", None, []],
        "smooth": [0, 0.5, "true"],
        "scale_type": ["float32", None],
        "modules": [None, [], "all"],
        "unknown_key": [1],
    }
    for key, options in wrong.items():
        for value in options:
            yield _config_case(f"{key}={value!r}", errors.QuantizationConfigError, (key,), **{key: value})
    for key in ("weight_bits", "act_clip", "rank", "modules"):
        yield Case(
            f"quantization_config without {key}",
            errors.QuantizationConfigError,
            (key,),
            before=lambda raw, key=key: raw.quantization.pop(key),
        )
    for diff in (17, "keep", None, [], {"rank": 300}, {"bits": 4}, {"modules": {}}):
        yield Case(
            f"module override {diff!r}",
            errors.QuantizationConfigError,
            (PATH,),
            before=lambda raw, diff=diff: raw.quantization["modules"].update({PATH: diff}),
        )


def indexes() -> Iterator[Case]:
    """The shard index: every entry is a name an attacker may have chosen."""
    for name in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "C:x", "x\0.safetensors"):
        yield _index_case(f"path {name!r}", errors.UnsafePathError, lambda m, name=name: m.update({Q: name}))
    yield _index_case("missing shard", errors.MissingShardError, lambda m: m.update({Q: "gone.safetensors"}), ("gone",))
    yield _index_case("value is a number", errors.MalformedJsonError, lambda m: m.update({Q: 3}))
    yield _index_case("tensor left out", errors.ShardIndexError, lambda m: m.pop(Q), (Q,))
    yield _index_case("unknown tensor", errors.ShardIndexError, lambda m: m.update(new=m[Q]), ("new",))
    yield _index_case("tensor in another shard", errors.ShardIndexError, lambda m: m.update({Q: m[NORM]}), (Q,))
    for weight_map in (None, [], {}):
        yield Case(
            f"index: weight_map {weight_map!r}",
            errors.MalformedJsonError,
            (INDEX,),
            after=lambda folder, w=weight_map: edit_json(folder / INDEX, lambda i: i.update(weight_map=w)),
            shards=3,
        )
    yield Case(
        "shard deleted",
        errors.MissingShardError,
        ("model-00002-of-00003.safetensors",),
        after=lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
        shards=3,
    )
    yield Case(
        "index beside a single file",
        errors.ShardIndexError,
        (WEIGHTS, INDEX),
        after=lambda folder: shutil.copy(folder / "model-00001-of-00003.safetensors", folder / WEIGHTS),
        shards=3,
    )
    yield Case(
        "index not JSON", errors.MalformedJsonError, (INDEX,), after=lambda f: (f / INDEX).write_text("{"), shards=3
    )
    yield Case(
        "two shards with the same tensors",
        errors.ShardIndexError,
        ("both in",),
        after=_duplicate_a_shard,
        shards=3,
    )
    yield Case(
        "shard renamed in the index alone",
        errors.ShardIndexError,
        ("model-00002-of-00003.safetensors",),
        after=_rename_a_shard,
        shards=3,
    )


def manifests() -> Iterator[Case]:
    for key in ("omniw4_version", "source", "recipe", "calibration", "layers", "skipped", "tensors", "files"):
        yield Case(
            f"omniw4.json without {key}",
            errors.MalformedJsonError,
            (MANIFEST, key),
            after=lambda folder, key=key: edit_json(folder / MANIFEST, lambda m: m.pop(key)),
        )
        yield Case(
            f"omniw4.json with {key}=7",
            errors.MalformedJsonError,
            (MANIFEST, key),
            after=lambda folder, key=key: edit_json(folder / MANIFEST, lambda m: m.update({key: 7})),
        )
    for version in (2, None, "1"):
        yield _manifest_case(
            f"format_version {version!r}", errors.FormatVersionError, lambda m, v=version: m.update(format_version=v)
        )
    for name in ("../x", "/x", "a/../../x", "a//b", "", "a\\b"):
        yield _manifest_case(
            f"file {name!r}", errors.UnsafePathError, lambda m, n=name: m["files"].update({n: m["files"][WEIGHTS]})
        )
    yield _manifest_case("no hash", errors.MalformedJsonError, lambda m: m["files"][WEIGHTS].pop("sha256"))
    yield _manifest_case("tensor no string", errors.MalformedJsonError, lambda m: m["tensors"].update({Q: 1}))
    yield _manifest_case(
        "file that is not among the weights",
        errors.ShardIndexError,
        lambda m: m["files"].update({"x.safetensors": m["files"][WEIGHTS]}),
    )
    yield _manifest_case("linear without a report", errors.MalformedJsonError, lambda m: m["layers"].pop(PATH), (PATH,))
    yield _manifest_case("report of no linear", errors.MalformedJsonError, lambda m: m["layers"].update(x={}), ("'x'",))
    for key, value in {"method": None, "sqnr_db": "20", "rounds": [True, "x"], "best_round": 1.5, "new": 1}.items():
        yield _manifest_case(
            f"report with {key}={value!r}",
            errors.MalformedJsonError,
            lambda m, k=key, v=value: m["layers"][PATH].update({k: v}),
            (PATH, key),
        )
    yield _manifest_case(
        "report cut short", errors.MalformedJsonError, lambda m: m["layers"][PATH].pop("damp"), (PATH, "damp")
    )


def files() -> Iterator[Case]:
    for name in (CONFIG, MANIFEST, WEIGHTS):
        yield Case(f"no {name}", errors.MissingFileError, (name,), after=lambda f, name=name: (f / name).unlink())
    for name in (CONFIG, MANIFEST):
        for title, text in {"empty": "", "no JSON": "{", "a list": "[1]", "not UTF-8": "\udcff"}.items():
            yield Case(
                f"{name}: {title}",
                errors.MalformedJsonError,
                (name,),
                after=lambda f, name=name, text=text: (f / name).write_bytes(text.encode(errors="surrogateescape")),
            )
        yield Case(
            f"{name} is a folder",
            errors.UnreadableFileError,
            (name,),
            after=lambda f, name=name: ((f / name).unlink(), (f / name).mkdir()),
        )
    yield Case("no folder", errors.MissingFileError, ("no checkpoint folder",), after=shutil.rmtree)


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


def _tensor_case(error: type, part: str, tensor: Any, mentions: tuple[str, ...] = ()) -> Case:
    return Case(
        f"{part} {tensor[0]}{tensor[1]}",
        error,
        mentions or (f"{PATH}.{part}", tensor[0]),
        before=lambda raw: raw.tensors.update({f"{PATH}.{part}": tensor}),
    )


def _config_case(name: str, error: type, mentions: tuple[str, ...] = (), **changes: Any) -> Case:
    return Case(f"config: {name}", error, mentions, before=lambda raw: raw.quantization.update(changes))


def _index_case(
    name: str, error: type, change: Callable[[dict[str, Any]], Any], mentions: tuple[str, ...] = (INDEX,)
) -> Case:
    return Case(
        f"index: {name}",
        error,
        mentions,
        after=lambda folder: edit_json(folder / INDEX, lambda index: change(index["weight_map"])),
        shards=3,
    )


def _manifest_case(
    name: str, error: type, change: Callable[[dict[str, Any]], Any], mentions: tuple[str, ...] = (MANIFEST,)
) -> Case:
    return Case(f"omniw4.json: {name}", error, mentions, after=lambda folder: edit_json(folder / MANIFEST, change))


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def _set_length(path: Path, change: Callable[[int], int]) -> None:
    header, data = read_parts(path)
    write_parts(path, header, data, change(len(header)))


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


def _duplicate_a_shard(folder: Path) -> None:
    """The third shard becomes a copy of the second, and its own tensors a part of the first, unknown to the index."""
    first, third = folder / "model-00001-of-00003.safetensors", folder / "model-00003-of-00003.safetensors"
    second = folder / "model-00002-of-00003.safetensors"
    h1, d1 = read_parts(first)
    h3, d3 = read_parts(third)
    merged = json.loads(h1)
    for name, entry in json.loads(h3).items():
        if name != "__metadata__":
            merged[name] = {**entry, "data_offsets": [o + len(d1) for o in entry["data_offsets"]]}
    write_parts(first, json.dumps(merged).encode(), d1 + d3)
    shutil.copy(second, third)


def _rename_a_shard(folder: Path) -> None:
    old = "model-00002-of-00003.safetensors"
    (folder / old).rename(folder / "other.safetensors")
    edit_json(
        folder / INDEX,
        lambda index: index.update(
            weight_map={k: "other.safetensors" if v == old else v for k, v in index["weight_map"].items()}
        ),
    )
