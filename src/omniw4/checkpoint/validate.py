"""Everything that is checked about a checkpoint before a tensor is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniw4.checkpoint import schema
from omniw4.checkpoint.header import (
    MAX_HEADER_BYTES,
    TensorFile,
    TensorInfo,
    changed,
    check_regular,
    describe,
    read_header,
    unique_keys,
)
from omniw4.checkpoint.schema import StoredLinear
from omniw4.errors import (
    HashMismatchError,
    MalformedJsonError,
    MissingFileError,
    MissingShardError,
    MissingTensorError,
    RenamedTensorError,
    ShardIndexError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
    UnreadableFileError,
    UnsafePathError,
)
from omniw4.storage import sha256_file
from omniw4.storage.files import Stamp, stamp_of
from omniw4.tensors import LinearSpec

_MANIFEST_KEYS: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "omniw4_version": (str,),
    "source": (dict,),
    "recipe": (dict,),
    "calibration": (dict, type(None)),
    "layers": (dict,),
    "skipped": (dict,),
    "tensors": (dict,),
    "files": (dict,),
}


@dataclass(frozen=True)
class Structure:
    """A checkpoint whose headers, names, dtypes and shapes are those of the format."""

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    specs: dict[str, LinearSpec]
    linears: dict[str, StoredLinear]
    shards: list[TensorFile]

    def shard_of(self) -> dict[str, TensorFile]:
        return {name: shard for shard in self.shards for name in shard.tensors}


def check_structure(folder: str | Path) -> Structure:
    """Check a checkpoint folder without reading tensor data: cost and memory are those of its headers.

    Raises:
        CheckpointError: the subclass names the broken rule of docs/checkpoint-format.md, the message the file or
            tensor, what was found and what was wanted.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingFileError(f"no checkpoint folder {str(folder)!r}", hint="name a folder written by omniw4 quantize")
    before = _stamps(folder)
    config = read_json(folder / schema.CONFIG)
    specs = schema.parse_quantization_config(config.get("quantization_config"))
    manifest = _read_manifest(folder / schema.MANIFEST)
    shards = read_shards(folder)
    tensors = {name: info for shard in shards for name, info in shard.tensors.items()}
    _check_listed(manifest["tensors"], tensors)
    _check_index(folder, shards)
    _check_manifest_files(manifest["files"], shards)
    linears = {path: schema.check_linear(path, spec, tensors) for path, spec in specs.items()}
    _check_unlisted(specs, tensors)
    _check_reports(manifest["layers"], specs)
    _check_content(config["quantization_config"], manifest)
    if _stamps(folder) != before:  # each file is whole, but they may be of two checkpoints
        raise changed(folder)
    return Structure(folder, config, manifest, specs, linears, shards)


def _stamps(folder: Path) -> list[Stamp | None]:
    """Of the two files that every checkpoint has; None for one that is not there."""
    found: list[Stamp | None] = []
    for name in (schema.CONFIG, schema.MANIFEST):
        try:
            found.append(stamp_of(os.stat(folder / name)))
        except OSError:
            found.append(None)
    return found


def content_hash(quantization_config: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """The checkpoint's hash: SHA-256 over quantization_config and the recorded hashes of its own weight files.

    Args:
        files: ``files`` of omniw4.json.
    """
    hashes = {name: entry["sha256"] for name, entry in files.items() if "/" not in name}
    canonical = json.dumps([quantization_config, hashes], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_hashes(structure: Structure) -> None:
    """Read every tensor file and compare it with the SHA-256 in omniw4.json.

    Raises:
        HashMismatchError: naming every file whose bytes are not those that were written.
        MissingFileError: a tensor file of a nested folder is not there.
    """
    damaged = []
    for name, entry in structure.manifest["files"].items():
        path = structure.folder / name
        if not _is_file(path):
            raise MissingFileError(f"no file {name!r}, though {schema.MANIFEST} lists it")
        found = sha256_file(path)
        if found != entry["sha256"]:
            damaged.append(f"{name} (sha256 {found[:12]}…, wanted {entry['sha256'][:12]}…)")
    if damaged:
        raise HashMismatchError(
            f"damaged since it was written: {', '.join(damaged)}", hint="copy or download the checkpoint again"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises MissingFileError, UnreadableFileError or MalformedJsonError."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_HEADER_BYTES:
                raise MalformedJsonError(f"{path.name} holds {size} bytes, more than the allowed {MAX_HEADER_BYTES}")
            text = file.read(size)
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError as e:
        hint = "name a folder written by omniw4 quantize"
        if any(parent.name.endswith(".partial") for parent in path.absolute().parents):
            hint = "this is an unfinished run: repeat the command that made it; `omniw4 quantize` takes --resume"
        raise MissingFileError(f"no {path.name} in {str(path.parent)!r}", hint=hint) from e
    except OSError as e:
        raise UnreadableFileError(f"cannot read {str(path)!r}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise MalformedJsonError(f"{path.name} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise MalformedJsonError(f"{path.name} holds a {type(data).__name__}, wanted a mapping")
    return data


def read_shards(folder: Path) -> list[TensorFile]:
    """Headers of a model folder's weight files: the single one, or those the index names, in the order of names."""
    index, single = folder / schema.INDEX, folder / schema.WEIGHTS
    if not index.is_file():
        if not single.is_file():
            raise MissingFileError(f"neither {schema.WEIGHTS} nor {schema.INDEX} in {str(folder)!r}")
        return [read_header(single)]
    if single.is_file():
        raise ShardIndexError(f"both {schema.WEIGHTS} and {schema.INDEX} are there, wanted one of them")
    shards = []
    for name in sorted(set(_weight_map(index).values())):
        if not _is_file(folder / name):
            raise MissingShardError(f"{schema.INDEX} names the file {name!r}, which is not there")
        shards.append(read_header(folder / name))
    return shards


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file's can be
        return False


def _weight_map(index: Path) -> dict[str, str]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise MalformedJsonError(f"{index.name}: weight_map is missing, empty or no mapping")
    for tensor, file in weights.items():
        if not isinstance(file, str):
            raise MalformedJsonError(f"{index.name}: tensor {tensor!r} is mapped to {str(file)[:40]}, wanted a name")
        _check_plain_name(file, index.name)
    return weights


def _check_plain_name(name: str, where: str) -> None:
    """A shard lies in the checkpoint's own folder, so its name holds no separator and is no way up."""
    if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
        raise UnsafePathError(f"{where} names the file {name[:80]!r}, wanted a plain name in the same folder")


def _check_index(folder: Path, shards: list[TensorFile]) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in seen:
                raise ShardIndexError(f"tensor {name!r} is both in {seen[name]} and in {shard.path.name}")
            seen[name] = shard.path.name
    index = folder / schema.INDEX
    if not index.is_file():
        return
    weights = _weight_map(index)
    for name in sorted({*weights, *seen}):
        if weights.get(name) != seen.get(name):
            listed, found = weights.get(name, "no file"), seen.get(name, "no file")
            raise ShardIndexError(f"{index.name} puts tensor {name!r} in {listed}, it is in {found}")


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    schema.check_version(manifest.get("format_version"), path.name)
    for key, types in _MANIFEST_KEYS.items():
        if key not in manifest or not isinstance(manifest[key], types):
            raise MalformedJsonError(f"{path.name}: {key} is missing or of the wrong type")
    if not isinstance(manifest.get("distillation"), dict | None):
        raise MalformedJsonError(f"{path.name}: distillation is of the wrong type")
    for name, entry in manifest["files"].items():
        if any(part in ("", ".", "..") for part in name.split("/")) or any(c in name for c in "\\:\0"):
            raise UnsafePathError(f"{path.name} names the file {name[:80]!r}, wanted a path inside the checkpoint")
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            raise MalformedJsonError(f"{path.name}: files[{name!r}] has no sha256")
    for name, text in manifest["tensors"].items():
        if not isinstance(text, str):
            raise MalformedJsonError(f"{path.name}: tensors[{name!r}] is no string such as 'F16[24,192]'")
    return manifest


def _check_listed(listed: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """The tensors found are those omniw4.json lists, with the same dtypes and shapes."""
    missing = sorted(listed.keys() - tensors.keys(), key=schema.natural_order)
    extra = sorted(tensors.keys() - listed.keys(), key=schema.natural_order)
    if missing and extra:
        alike = next((name for name in extra if str(tensors[name]) == listed[missing[0]]), extra[0])
        raise RenamedTensorError(
            f"tensor {missing[0]!r} is missing and {alike!r} is unknown{_and_more(missing)}",
            hint="a renamed tensor would load as random numbers: quantize again, or copy the checkpoint again",
        )
    if missing:
        raise MissingTensorError(f"tensor {missing[0]!r} {listed[missing[0]]} is missing{_and_more(missing)}")
    if extra:
        raise UnexpectedTensorError(f"tensor {extra[0]!r} is not listed in {schema.MANIFEST}{_and_more(extra)}")
    for name, info in tensors.items():
        if str(info) == listed[name]:
            continue
        same_shape = listed[name].endswith(describe("", info.shape))
        kind = TensorDtypeError if same_shape else TensorShapeError
        raise kind(f"tensor {name!r} is {info}, {schema.MANIFEST} says {listed[name][:80]}")


def _check_manifest_files(files: Mapping[str, Any], shards: list[TensorFile]) -> None:
    listed = {name for name in files if "/" not in name}
    found = {shard.path.name for shard in shards}
    if listed != found:
        name = min(listed ^ found)
        where = (schema.MANIFEST, "the weights") if name in listed else ("the weights", schema.MANIFEST)
        raise ShardIndexError(f"file {name!r} belongs to {where[0]} and not to {where[1]}")


def _check_content(quantization_config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Settings that differ from those the weights were written with would give wrong numbers and no error."""
    wanted = manifest.get("hash")
    if wanted is None:  # a writer may leave it out
        return
    found = content_hash(quantization_config, manifest["files"])
    if found != wanted:
        raise HashMismatchError(
            f"quantization_config in {schema.CONFIG}, or the hashes in {schema.MANIFEST}, are not those that were "
            f"written together (sha256 {found[:12]}…, wanted {str(wanted)[:12]}…)",
            hint="copy or download the checkpoint again; settings cannot be changed after quantization",
        )


def _check_unlisted(specs: Mapping[str, LinearSpec], tensors: Mapping[str, TensorInfo]) -> None:
    for name in tensors:
        path, _, part = name.rpartition(".")
        if part in schema.OWN_PARTS and path not in specs:
            raise UnexpectedTensorError(f"tensor {name!r} is there, but quantization_config does not list its linear")
        if part == "weight" and path in specs:
            raise UnexpectedTensorError(f"tensor {name!r} is there, though its linear is quantized")


def _check_reports(layers: Mapping[str, Any], specs: Mapping[str, LinearSpec]) -> None:
    for path in sorted({*layers} ^ {*specs}):
        where = "omniw4.json" if path in layers else "quantization_config"
        raise MalformedJsonError(f"linear {path!r} is listed in {where} alone")
    for path, report in layers.items():
        if not isinstance(report, dict):
            raise MalformedJsonError(f"{schema.MANIFEST}: layers[{path!r}] is no mapping")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
