"""Folders whose config, index, omniw4.json or files are wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_case import CONFIG, INDEX, MANIFEST, NORM, WEIGHTS, Case, Q
from raw_checkpoint import (
    PATH,
    edit_json,
    read_parts,
    write_parts,
)

from omniw4 import errors


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
            f"{name}: a hole of 100 GiB",
            errors.MalformedJsonError,
            (name, "more than the allowed 100000000"),
            after=lambda f, name=name: os.truncate(f / name, 100 << 30),
        )
        yield Case(
            f"{name} is a folder",
            errors.UnreadableFileError,
            (name,),
            after=lambda f, name=name: ((f / name).unlink(), (f / name).mkdir()),
        )
    yield Case("no folder", errors.MissingFileError, ("no checkpoint folder",), after=shutil.rmtree)


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
