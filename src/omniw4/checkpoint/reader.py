"""A checkpoint opened for reading: checked as a whole first, tensors read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omniw4 import int4
from omniw4.checkpoint import schema, validate
from omniw4.checkpoint.header import TensorFile
from omniw4.checkpoint.schema import StoredLinear
from omniw4.errors import MalformedJsonError, NonFiniteTensorError, ScaleValueError
from omniw4.storage.tensor_file import DTYPES
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear

TORCH_DTYPES: dict[str, torch.dtype] = {
    safe: getattr(torch, name) for name, (safe, _) in DTYPES.items() if hasattr(torch, name)
}


def read_tensor(file: TensorFile, name: str) -> torch.Tensor:
    """One tensor of a file whose header was checked, in memory of its own (no mapping of the file)."""
    info = file.tensors[name]
    data = bytearray(info.nbytes)
    filled = 0
    for chunk in file.chunks(name):
        data[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if not data:
        return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype]).reshape(info.shape)


_REPORT_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "out_features": ("an integer", (int,)),
    "in_features": ("an integer", (int,)),
    "method": ("a string", (str,)),
    "relative_error": ("a number", (int, float, type(None))),
    "sqnr_db": ("a number", (int, float, type(None))),
    "damp": ("a number", (int, float, type(None))),
    "rank_energy": ("a number", (int, float, type(None))),
    "rounds": ("a list", (list,)),
    "best_round": ("an integer", (int,)),
    "rtn_error": ("a number", (int, float, type(None))),
    "warnings": ("a list", (list,)),
    "smooth_strength": ("a number", (int, float)),
}
_OPTIONAL = {"smooth_strength"}  # absent where there is none, and from what versions before it wrote


class Checkpoint:
    """A checkpoint folder; make one with :meth:`open`.

    Attributes:
        folder: where it lies.
        config: config.json, quantization_config included.
        specs: spec of every quantized linear by its full module path.
        linears: shape and stored size of the same.
        reports: what quantizing them did (``seconds`` is not stored and reads as 0).
        recipe: the recipe section of a config: ``config.parse({"recipe": checkpoint.recipe}, origin=...)``.
        provenance: format_version, omniw4_version, source (name, hash), calibration (fingerprint, or None),
            distillation (data and report, or None).
        skipped: linears that were left as they were, with the reason.
        other_names: tensors stored as they were, in natural order.
    """

    def __init__(self, structure: validate.Structure) -> None:
        manifest = structure.manifest
        self._structure = structure
        self._shard_of = structure.shard_of()
        self.folder: Path = structure.folder
        self.config: dict[str, Any] = structure.config
        self.specs: dict[str, LinearSpec] = structure.specs
        self.linears: dict[str, StoredLinear] = structure.linears
        self.reports: dict[str, LayerReport] = {p: parse_report(p, r) for p, r in manifest["layers"].items()}
        self.recipe: dict[str, Any] = manifest["recipe"]
        self.skipped: dict[str, str] = manifest["skipped"]
        self.provenance: dict[str, Any] = {
            key: manifest[key] for key in ("format_version", "omniw4_version", "source", "calibration")
        }
        self.provenance["distillation"] = manifest.get("distillation")
        owned = {f"{path}.{part}" for path in self.specs for part in schema.PARTS}
        self.other_names: list[str] = sorted(self._shard_of.keys() - owned, key=schema.natural_order)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Check headers, names, dtypes and shapes; no tensor data is read.

        Raises:
            CheckpointError: see :func:`omniw4.checkpoint.validate.check_structure`.
        """
        return cls(validate.check_structure(folder))

    @property
    def quantization_config(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def hash(self) -> str:
        """SHA-256 over quantization_config and the recorded hashes of the weight files: names the content."""
        return validate.content_hash(self.quantization_config, self._structure.manifest["files"])

    @property
    def files(self) -> list[TensorFile]:
        """The weight files with their checked headers."""
        return self._structure.shards

    def linear(self, path: str, device: torch.device | str = "cpu", *, check_values: bool = True) -> QuantizedLinear:
        """Read one quantized linear.

        Args:
            check_values: refuse NaN, inf and scales out of range.

        Raises:
            KeyError: no quantized linear has this path.
            NonFiniteTensorError, ScaleValueError: naming the tensor and the first bad element.
        """
        names = {part: f"{path}.{part}" for part in schema.PARTS if f"{path}.{part}" in self._shard_of}
        linear = QuantizedLinear(self.specs[path], **{part: self._read(name) for part, name in names.items()})
        if check_values:
            check_linear_values(path, linear)
        return linear.to(device)

    def other(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read one tensor that is stored as it was; raises KeyError for an unknown name."""
        return self._read(name).to(device)

    def check_hashes(self) -> None:
        """Read every tensor file and compare hashes; raises HashMismatchError naming the damaged files."""
        validate.check_hashes(self._structure)

    def effective_bits(self) -> float:
        """Stored bits per quantized weight: codes, scales, low-rank branch and smoothing; biases not counted."""
        weights = sum(linear.out_features * linear.in_features for linear in self.linears.values())
        return 8 * sum(linear.stored_bytes for linear in self.linears.values()) / weights if weights else 0.0

    def _read(self, name: str) -> torch.Tensor:
        return read_tensor(self._shard_of[name], name)


def check_linear_values(path: str, linear: QuantizedLinear) -> None:
    """Raise NonFiniteTensorError or ScaleValueError, naming the tensor and the first bad element."""
    for part, tensor in linear.tensors().items():
        if not tensor.is_floating_point():
            continue
        _refuse(NonFiniteTensorError, path, part, tensor, ~torch.isfinite(tensor), "a finite number")
    if linear.row_scales is None:
        _refuse(ScaleValueError, path, "w_scales", linear.w_scales, linear.w_scales < 0, "0 or more")
    else:
        too_large = linear.w_scales > int4.INTEGER_SCALE_MAX
        _refuse(ScaleValueError, path, "w_scales", linear.w_scales, too_large, f"0 to {int4.INTEGER_SCALE_MAX}")
        _refuse(ScaleValueError, path, "row_scales", linear.row_scales, linear.row_scales < 0, "0 or more")
    if linear.smooth is not None:
        _refuse(ScaleValueError, path, "smooth", linear.smooth, linear.smooth <= 0, "more than 0")


def _refuse(error: type, path: str, part: str, tensor: torch.Tensor, bad: torch.Tensor, wanted: str) -> None:
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        where = f"tensor '{path}.{part}'[{', '.join(map(str, first))}]"
        raise error(f"{where} is {tensor[first].item()}, wanted {wanted}", hint="quantize the model again")


def parse_report(path: str, data: dict[str, Any]) -> LayerReport:
    """A LayerReport from JSON, where NaN is written as null and path and seconds are left out.

    Raises:
        MalformedJsonError: a key is missing, unknown, or of the wrong type.
    """
    values: dict[str, Any] = {"path": path, "seconds": 0.0}
    for key, (wanted, types) in _REPORT_TYPES.items():
        value = data.get(key)
        if key in _OPTIONAL and key not in data:
            continue
        if key not in data or not isinstance(value, types) or isinstance(value, bool):
            raise MalformedJsonError(f"report of {path!r}: {key} is {str(value)[:40]}, wanted {wanted}")
        values[key] = _number(value) if wanted == "a number" else value
    if unknown := sorted(data.keys() - _REPORT_TYPES.keys()):
        raise MalformedJsonError(f"report of {path!r}: unknown key {unknown[0]!r}")
    if not all(isinstance(error, int | float | None) for error in values["rounds"]):
        raise MalformedJsonError(
            f"report of {path!r}: rounds is {str(values['rounds'])[:40]}, wanted a list of numbers"
        )
    values["rounds"] = [_number(error) for error in values["rounds"]]
    if values["sqnr_db"] != values["sqnr_db"] and values["relative_error"] == 0:
        values["sqnr_db"] = float("inf")  # of a linear that is held exactly; JSON has no infinity
    return LayerReport(**values)


def _number(value: Any) -> float:
    try:
        return float("nan") if value is None else float(value)
    except OverflowError:  # JSON has integers that no float can hold
        return float("inf")


def dump_report(report: LayerReport) -> dict[str, Any]:
    """The part of a report that is stored: without the path (its key), the time (never the same twice), and what is
    optional and None."""
    stored = {key: value for key, value in report.to_dict().items() if key not in ("path", "seconds")}
    return {key: value for key, value in stored.items() if key not in _OPTIONAL or value is not None}
