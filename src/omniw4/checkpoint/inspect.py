"""Summary of a checkpoint, or of any safetensors file, from headers and metadata alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omniw4.checkpoint.header import TensorFile, read_header
from omniw4.checkpoint.reader import Checkpoint
from omniw4.checkpoint.schema import MANIFEST
from omniw4.errors import MissingFileError
from omniw4.storage.files import without_nan


@dataclass(frozen=True)
class TensorRow:
    name: str
    dtype: str
    shape: list[int]
    bytes: int
    file: str


@dataclass(frozen=True)
class LayerRow:
    """One quantized linear: shape, how, stored size, and what its report says."""

    path: str
    out_features: int
    in_features: int
    act_bits: int
    rank: int
    rotation: str
    scale_type: str
    bits: float  # stored bits a weight
    method: str
    relative_error: float
    rtn_error: float  # of the data-free recipe on the same linear
    sqnr_db: float
    rank_energy: float
    damp: float
    smooth_strength: float | None  # where it was searched
    warnings: list[str]


@dataclass(frozen=True)
class Summary:
    """What ``omniw4 inspect`` shows. ``kind`` is "checkpoint" or "file"; a file has tensors and metadata alone."""

    kind: str
    name: str
    tensors: list[TensorRow]
    files: dict[str, int]  # name -> bytes
    total_bytes: int
    metadata: dict[str, str] = field(default_factory=dict)
    hash: str = ""
    quantization_config: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    layers: list[LayerRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    effective_bits: float = 0.0
    quantized_bytes: int = 0
    other_bytes: int = 0
    original_bytes: int = 0  # what the quantized linears took in 16 bits

    def to_dict(self) -> dict[str, Any]:
        """JSON-like; the SQNR of a linear that is held exactly, infinite, is None."""
        document: dict[str, Any] = without_nan(asdict(self))
        return document


def summarize(path: str | Path) -> Summary:
    """Summarise a checkpoint folder or a single safetensors file; cost is that of its headers.

    Raises:
        CheckpointError: what is there is no checkpoint, or no safetensors file; the subclass names the rule.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise MissingFileError(
            f"no file or folder {str(path)!r}", hint="name a checkpoint folder, or a .safetensors file"
        )
    if path.is_dir():
        try:
            return _summarize_checkpoint(Checkpoint.open(path))
        except MissingFileError as e:
            if not (path / MANIFEST).exists() and (weights := _weights_in(path)):
                others = f", or another of {len(weights)}" if len(weights) > 1 else ""
                e.hint = f"the folder is no checkpoint of omniw4; inspect the file in it: {weights[0]}{others}"
            raise
    file = read_header(path)
    return Summary("file", path.name, _rows(file), {path.name: file.nbytes}, file.nbytes, file.metadata)


class Warned(Protocol):
    """A row of a summary, or a report."""

    @property
    def path(self) -> str: ...

    @property
    def warnings(self) -> list[str]: ...


def same_warnings(rows: Iterable[Warned]) -> dict[str, list[str]]:
    """Every warning once, with the paths that have it; texts that differ in numbers alone count as one."""
    paths: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for row in rows:
        for text in row.warnings:
            kind = re.sub(r"[0-9][0-9.e+-]*", "#", text)
            paths.setdefault(shown.setdefault(kind, text), []).append(row.path)
    return paths


def _summarize_checkpoint(checkpoint: Checkpoint) -> Summary:
    tensors = [row for file in checkpoint.files for row in _rows(file)]
    files = {file.path.name: file.nbytes for file in checkpoint.files}
    others = set(checkpoint.other_names)
    layers = []
    for path, linear in checkpoint.linears.items():
        spec, report = checkpoint.specs[path], checkpoint.reports[path]
        layers.append(
            LayerRow(
                path=path,
                out_features=linear.out_features,
                in_features=linear.in_features,
                act_bits=spec.act_bits,
                rank=spec.rank,
                rotation=spec.rotation,
                scale_type=spec.scale_type,
                bits=linear.effective_bits,
                method=report.method,
                relative_error=report.relative_error,
                rtn_error=report.rtn_error,
                sqnr_db=report.sqnr_db,
                rank_energy=report.rank_energy,
                damp=report.damp,
                smooth_strength=report.smooth_strength,
                warnings=report.warnings,
            )
        )
    return Summary(
        kind="checkpoint",
        name=checkpoint.folder.resolve().name,
        tensors=tensors,
        files=files,
        total_bytes=sum(files.values()),
        metadata=checkpoint.files[0].metadata,
        hash=checkpoint.hash,
        quantization_config=checkpoint.quantization_config,
        recipe=checkpoint.recipe,
        provenance=checkpoint.provenance,
        layers=layers,
        skipped=checkpoint.skipped,
        effective_bits=checkpoint.effective_bits(),
        quantized_bytes=sum(row.bytes for row in tensors if row.name not in others),
        other_bytes=sum(row.bytes for row in tensors if row.name in others),
        original_bytes=sum(2 * linear.out_features * linear.in_features for linear in checkpoint.linears.values()),
    )


def _weights_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == ".safetensors" and file.is_file())


def _rows(file: TensorFile) -> list[TensorRow]:
    return [
        TensorRow(name, info.dtype, list(info.shape), info.nbytes, file.path.name)
        for name, info in file.tensors.items()
    ]
