"""Layers and the source's other tensors into one model folder, streamed tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import omniw4
from omniw4.checkpoint import schema, source
from omniw4.checkpoint.header import describe
from omniw4.checkpoint.layers import LayerStore
from omniw4.checkpoint.reader import dump_report
from omniw4.checkpoint.schema import natural_order
from omniw4.checkpoint.validate import content_hash
from omniw4.errors import UsageError
from omniw4.model import LoadedModel
from omniw4.storage import (
    TensorFileWriter,
    atomic_write,
    atomic_write_json,
    explain_os_errors,
    sha256_file,
    tensor_bytes,
)

MAX_SHARD_SIZE = 5_000_000_000
_METADATA = {"format": "pt", "omniw4_format_version": str(schema.FORMAT_VERSION)}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Entry:
    """One tensor of the checkpoint; ``linear`` is the path of the quantized linear it belongs to, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    linear: str | None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def parse_size(text: str) -> int:
    """Bytes of ``"5GB"``, ``"500MiB"``, ``"4096"``; raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", text, re.IGNORECASE)
    size = round(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise UsageError(f"--max-shard-size is {text!r}, wanted a positive size", hint="write 5GB, 500MiB or bytes")
    return size


def assemble(
    target: str | Path,
    store: LayerStore,
    loaded: LoadedModel,
    *,
    recipe: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
    distillation: Mapping[str, Any] | None = None,
    skipped: Mapping[str, str] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the finished checkpoint; the same inputs give the same bytes.

    Memory: one tensor, or 4 MiB where bytes are copied. The index, or without shards omniw4.json, is written last,
    so a folder whose writing was cut off is never taken for a checkpoint.

    Args:
        target: an empty folder, such as ``OutputFolder.result``.
        store: every quantized linear.
        loaded: the source model; its other tensors are copied from its files, or from memory.
        recipe: ``config.recipe.model_dump(mode="json")``.
        calibration: fingerprint of the statistics; None for a data-free recipe.
        distillation: what was trained on which text; None when nothing was.
        skipped: path -> reason for every linear left as it is.
        max_shard_size: bytes of tensor data a weight file holds at most; a larger tensor gets a file of its own.

    Raises:
        StorageError: it cannot be written.
        CheckpointError: the source's files are damaged.
    """
    target = Path(target)
    specs = {path: store.spec(path) for path in sorted(store.done(), key=natural_order)}
    skipped = dict(skipped or {})
    quantization = schema.quantization_config(specs, skipped)
    config = source.source_config(loaded)
    source.untie(config, specs, loaded)
    tensors, entries = _collect(store, loaded)
    shards = plan_shards(entries, max_shard_size)

    with explain_os_errors("write", target):
        target.mkdir(parents=True, exist_ok=True)
        copied = source.copy_files(loaded, target)
    hashes = {name: sha256_file(target / name) for name in copied if name.endswith(".safetensors")}
    for name, shard in shards.items():
        with TensorFileWriter(target / name, {e.name: (e.dtype, e.shape) for e in shard}, _METADATA) as writer:
            for entry in shard:
                if entry.linear is None:
                    tensors.copy(entry.name, writer)
                else:
                    writer.write_bytes(entry.name, store.file(entry.linear).chunks(entry.name))
        hashes[name] = sha256_file(target / name)
    config["quantization_config"] = quantization
    atomic_write(target / schema.CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    manifest: dict[str, Any] = {
        "format_version": schema.FORMAT_VERSION,
        "omniw4_version": omniw4.__version__,
        "source": {"name": source.source_name(loaded), "hash": loaded.hash},
        "recipe": source.without_machine_paths(recipe),
        "calibration": source.without_machine_paths(calibration),
        **({} if distillation is None else {"distillation": source.without_machine_paths(distillation)}),
        "layers": {path: dump_report(store.report(path)) for path in specs},
        "skipped": {path: skipped[path] for path in sorted(skipped, key=natural_order)},
        "tensors": {entry.name: describe(entry.dtype, entry.shape) for entry in entries},
        "files": {
            name: {"bytes": (target / name).stat().st_size, "sha256": hashes[name]}
            for name in sorted(hashes, key=natural_order)
        },
    }
    manifest["hash"] = content_hash(quantization, manifest["files"])
    atomic_write_json(target / schema.MANIFEST, manifest)
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
        total = sum(entry.nbytes for entry in entries)
        atomic_write_json(target / schema.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def plan_shards(entries: list[Entry], max_shard_size: int) -> dict[str, list[Entry]]:
    """File name -> its tensors: entries in their order, a new file where the next one would not fit."""
    shards: list[list[Entry]] = [[]]
    room = max_shard_size
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(entry)
        room -= entry.nbytes
    if len(shards) == 1:
        return {schema.WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _collect(store: LayerStore, loaded: LoadedModel) -> tuple[source.SourceTensors, list[Entry]]:
    """Every tensor of the checkpoint in natural order: those of the layers in place of the weights they stand for."""
    entries, weights = [], {}
    for path in store.done():
        for name, info in store.file(path).tensors.items():
            entries.append(Entry(name, info.dtype, info.shape, path))
        rows, half = store.file(path).tensors[f"{path}.qweight"].shape
        weights[path] = (rows, 2 * half)
    tensors = source.open_tensors(loaded, weights)
    replaced = {f"{path}.{part}" for path in weights for part in ("weight", "bias")}
    for name, (dtype, shape) in tensors.layout.items():
        if name not in replaced:
            entries.append(Entry(name, dtype, shape, None))
    return tensors, sorted(entries, key=lambda entry: natural_order(entry.name))
