"""Calibration statistics on disk: ``stats.safetensors`` and a readable ``stats.json``.

``stats.safetensors`` holds, for each group of linears that read the same input (named after its first member):

    <group>.hessian              [K(K+1)/2] float32, upper triangle row by row: mean of x xᵀ
    <group>.hessian_normalized   the same of x / RMS(x)
    <group>.absmax, <group>.rms  [K] float32

``stats.json`` is written last, so a folder without it is not finished.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from omniw4.calibrate.accumulate import mirror_
from omniw4.calibrate.walk import Group
from omniw4.errors import StatsError
from omniw4.storage import TensorFileWriter, atomic_write_json, sha256_tensors, told_sizes
from omniw4.tensors import LinearStats

FORMAT_VERSION = 1
_TENSORS, _JSON = "stats.safetensors", "stats.json"
_MATRICES, _VECTORS = ("hessian", "hessian_normalized"), ("absmax", "rms")


class StatsWriter:
    """A :class:`~omniw4.calibrate.capture.Sink` that streams to a folder; peak memory is one group.

    Args:
        folder: an existing folder.
        fingerprint: model hash, text hash, tokens, BOS policy: whatever decides the statistics.
        provenance: versions and the like, which do not.
    """

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any], provenance: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._fingerprint, self._provenance = fingerprint, provenance
        self._file: TensorFileWriter | None = None
        self._groups: dict[str, dict[str, Any]] = {}

    def begin(self, groups: list[Group]) -> None:
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for group in groups:
            k = group.in_features
            layout |= {f"{group.name}.{name}": (torch.float32, (k * (k + 1) // 2,)) for name in _MATRICES}
            layout |= {f"{group.name}.{name}": (torch.float32, (k,)) for name in _VECTORS}
        metadata = {"format": "omniw4-stats", "fingerprint": _digest(self._fingerprint)}
        self._file = TensorFileWriter(self._folder / _TENSORS, layout, metadata)
        self._file.__enter__()

    def put(self, group: Group, stats: LinearStats) -> None:
        if self._file is None:
            raise StatsError("statistics were put before begin() named their groups")
        tensors = {name: pack_upper(getattr(stats, name)) for name in _MATRICES}
        tensors |= {name: getattr(stats, name).cpu() for name in _VECTORS}
        for name, tensor in tensors.items():
            self._file.write(f"{group.name}.{name}", tensor)
        self._groups[group.name] = {
            "members": list(group.members),
            "in_features": group.in_features,
            "tokens": stats.tokens,
            "excluded": stats.excluded,
            "sha256": sha256_tensors(tensors.values()),
        }

    def __enter__(self) -> StatsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)
        if kind is None:
            document = {
                "format": "omniw4-stats",
                "format_version": FORMAT_VERSION,
                "fingerprint": self._fingerprint,
                "provenance": self._provenance,
                "groups": self._groups,
            }
            atomic_write_json(self._folder / _JSON, document)


class Stats:
    """Statistics read back; tensors are read from disk when asked for.

    Attributes:
        fingerprint: model hash, text hash, tokens, BOS policy; ``through`` where quantized linears stood in.
        provenance: versions.
        groups: for each group its ``members``, ``in_features``, ``tokens`` and ``excluded``.
        paths: every linear that has statistics.
    """

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        self.fingerprint: dict[str, Any] = document["fingerprint"]
        self.provenance: dict[str, Any] = document["provenance"]
        self.groups: dict[str, dict[str, Any]] = document["groups"]
        self._group_of = {p: name for name, g in self.groups.items() if g["tokens"] for p in g["members"]}

    @classmethod
    def open(cls, folder: str | Path) -> Stats:
        """Open a folder that ``omniw4 calibrate`` wrote.

        Raises:
            StatsError: missing, unfinished, damaged, of another format version, or JSON and tensors of two runs.
        """
        folder = Path(folder)
        hint = "make statistics with `omniw4 calibrate MODEL --out DIR`"
        if not folder.is_dir():
            raise StatsError(f"no statistics folder {str(folder)!r}", hint=hint)
        for name in (_JSON, _TENSORS):
            if not (folder / name).is_file():
                raise StatsError(f"statistics folder {str(folder)!r} holds no {name}", hint=hint)
        try:
            document = json.loads((folder / _JSON).read_text(encoding="utf-8"))
            version = document["format_version"]
            stats = cls(folder, document)
            for name, group in stats.groups.items():
                counts = [group[key] for key in ("in_features", "tokens", "excluded")]
                if not all(type(count) is int and count >= 0 for count in counts):
                    raise ValueError(f"{name} has the counts {counts}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise StatsError(f"{_JSON} in {str(folder)!r} is not readable: {type(e).__name__} {e}", hint=hint) from e
        if document.get("format") != "omniw4-stats" or version != FORMAT_VERSION:
            found = f"statistics in {str(folder)!r} have format version {version}"
            raise StatsError(f"{found}, wanted {FORMAT_VERSION}", hint=hint)
        stats._check_file()
        return stats

    @property
    def paths(self) -> list[str]:
        return list(self._group_of)

    def group_of(self, path: str) -> str:
        """Name of the group whose statistics a linear shares; equal names mean equal statistics."""
        try:
            return self._group_of[path]
        except KeyError:
            raise StatsError(
                f"no statistics for {path}", hint="calibrate the model that is quantized, or skip this linear"
            ) from None

    def linear(self, path: str) -> LinearStats:
        """Statistics of one linear, read from disk.

        Raises:
            StatsError: there are none, they are not finite, or not what was written.
        """
        from safetensors import SafetensorError, safe_open

        name = self.group_of(path)
        group = self.groups[name]
        try:
            with safe_open(self.folder / _TENSORS, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(f"{name}.{key}") for key in (*_MATRICES, *_VECTORS)}
        except (SafetensorError, OSError) as e:
            raise StatsError(f"cannot read the statistics of {path}: {e}") from e
        if metadata.get("fingerprint") != _digest(self.fingerprint):
            raise StatsError(
                f"the statistics in {str(self.folder)!r} were replaced while they were read",
                hint="start again, with --overwrite",
            )
        k = group["in_features"]
        sizes = [(key, k * (k + 1) // 2) for key in _MATRICES] + [(key, k) for key in _VECTORS]
        for key, size in sizes:
            if tensors[key].shape != (size,):
                found = list(tensors[key].shape)
                raise StatsError(f"{name}.{key} of the statistics has shape {found}, wanted [{size}]")
        if not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise StatsError(f"the statistics of {path} hold NaN or inf", hint="calibrate again")
        if group.get("sha256") not in (None, sha256_tensors(tensors.values())):  # those of earlier versions have none
            raise StatsError(
                f"{_TENSORS} in {str(self.folder)!r} is damaged: the statistics of {path} are not what was written",
                hint="copy the folder again, or calibrate again",
            )
        for key in _MATRICES:
            tensors[key] = unpack_upper(tensors[key], group["in_features"])
        return LinearStats(**tensors, tokens=group["tokens"], excluded=group["excluded"])

    def check_model(self, model_hash: str, name: str = "") -> None:
        """Raises StatsError when the statistics are not of the model with this hash, called ``name`` in the message."""
        found = self.fingerprint.get("model", {})
        if found.get("hash") != model_hash:
            same = found.get("name") == name
            theirs = f"{found.get('name')!r}{', whose files have changed since' if same else ''}"
            raise StatsError(
                f"the statistics in {str(self.folder)!r} are of another model than the one given: of {theirs}",
                hint="run `omniw4 calibrate` on this model",
            )

    def _check_file(self) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.folder / _TENSORS
        try:
            with safe_open(path, framework="pt") as file:
                metadata, names = file.metadata() or {}, set(file.keys())
        except (SafetensorError, OSError) as e:
            raise StatsError(f"{_TENSORS} in {str(self.folder)!r} is damaged ({told_sizes(path)}): {e}") from e
        if metadata.get("fingerprint") != _digest(self.fingerprint):
            raise StatsError(f"{_JSON} and {_TENSORS} in {str(self.folder)!r} come from different calibrations")
        missing = {f"{group}.{key}" for group in self.groups for key in (*_MATRICES, *_VECTORS)} - names
        if missing:
            raise StatsError(f"{_TENSORS} in {str(self.folder)!r} lacks {min(missing)}")


def pack_upper(matrix: torch.Tensor) -> torch.Tensor:
    """``[K, K]`` symmetric to its upper triangle row by row, ``[K(K+1)/2]`` on the CPU."""
    k = len(matrix)
    packed = matrix.new_empty(k * (k + 1) // 2, device="cpu")
    begin, target = 0, packed.numpy()
    for i, row in enumerate(matrix.cpu().numpy()):
        target[begin : begin + k - i] = row[i:]
        begin += k - i
    return packed


def unpack_upper(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Inverse of :func:`pack_upper`."""
    matrix = packed.new_empty(k, k)
    begin, given = 0, packed.numpy()
    for i, row in enumerate(matrix.numpy()):
        row[i:] = given[begin : begin + k - i]
        begin += k - i
    return mirror_(matrix)


def _digest(fingerprint: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
