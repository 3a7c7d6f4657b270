"""Names, shapes, dtypes and settings of the format; the normative text is docs/checkpoint-format.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omniw4.checkpoint.header import TensorInfo
from omniw4.errors import (
    FormatVersionError,
    MissingTensorError,
    QuantizationConfigError,
    QuantMethodError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from omniw4.tensors import LinearSpec

QUANT_METHOD = "omniw4"
FORMAT_VERSION = 1
MANIFEST = "omniw4.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
RESULTS = ("verify.json", "bench.json", "profile.json", "roofline.json")  # of verbs, kept beside what they are about
EXPORT_NOTE = "omniw4-export.json"  # says what was exported; an export is replaced only where it is found

GROUP = 64
FLOATS = ("F16", "BF16")
SKIP = "skip"
PARTS = ("qweight", "w_scales", "row_scales", "proj_down", "proj_up", "smooth", "bias")
OWN_PARTS = PARTS[:-1]  # an unquantized linear has a bias, too

SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "weight_bits": ("4", lambda v: type(v) is int and v == 4),
    "act_bits": ("4, 8 or 16", lambda v: type(v) is int and v in (4, 8, 16)),
    "act_clip": ("a number above 0, at most 1", lambda v: type(v) in (int, float) and 0 < v <= 1),
    "group_size": ("64", lambda v: type(v) is int and v == GROUP),
    "rank": ("an integer from 0 to 256", lambda v: type(v) is int and 0 <= v <= 256),
    "rotation": ("'none' or 'hadamard64'", lambda v: v in ("none", "hadamard64")),
    "smooth": ("true or false", lambda v: type(v) is bool),
    "scale_type": ("'float16' or 'integer'", lambda v: v in ("float16", "integer")),
}


@dataclass(frozen=True)
class StoredLinear:
    """What the headers say about one quantized linear."""

    out_features: int
    in_features: int
    bias: bool
    stored_bytes: int  # all its tensors but the bias

    @property
    def effective_bits(self) -> float:
        return 8 * self.stored_bytes / (self.out_features * self.in_features)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that counts numbers: ``layers.2`` before ``layers.10``; names that differ have different keys."""
    key = [(-1, 0, name)]
    for i, part in enumerate(re.split(r"([0-9]+)", name)):  # words and numbers in turn
        digits = part.lstrip("0")  # compared by length first, so that no number is too long
        key.append((0, len(digits), digits) if i % 2 else (1, 0, part))
    return [*key[1:], key[0]]


def quantization_config(specs: Mapping[str, LinearSpec], skipped: Iterable[str] = ()) -> dict[str, Any]:
    """The ``quantization_config`` of config.json: the commonest spec, and every linear's difference from it.

    Args:
        specs: spec of every quantized linear by its full module path.
        skipped: paths of the linears left as they were.
    """
    paths = sorted(specs, key=natural_order)
    counts = Counter(specs[path] for path in paths)
    base = counts.most_common(1)[0][0].to_dict() if counts else LinearSpec().to_dict()
    modules: dict[str, Any] = {path: SKIP for path in skipped}
    for path in paths:
        modules[path] = {key: value for key, value in specs[path].to_dict().items() if value != base[key]}
    settings = {key: base[key] for key in SETTINGS}
    ordered = {path: modules[path] for path in sorted(modules, key=natural_order)}
    return {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, **settings, "modules": ordered}


def parse_quantization_config(config: Any) -> dict[str, LinearSpec]:
    """Spec of every quantized linear by its full module path, in the config's order.

    Raises:
        QuantMethodError: no quantization_config, or another method's.
        FormatVersionError: a version this package does not read.
        QuantizationConfigError: a key or value the format does not have, or a missing one.
    """
    if not isinstance(config, Mapping):
        raise QuantMethodError(
            "config.json has no quantization_config", hint="make a checkpoint with `omniw4 quantize MODEL --out DIR`"
        )
    if config.get("quant_method") != QUANT_METHOD:
        raise QuantMethodError(
            f"the model is quantized by {config.get('quant_method')!r}, wanted {QUANT_METHOD!r}",
            hint="make a checkpoint with `omniw4 quantize MODEL --out DIR`",
        )
    check_version(config.get("format_version"), "quantization_config")
    modules = config.get("modules")
    if not isinstance(modules, Mapping):
        raise QuantizationConfigError("quantization_config: modules is missing or no mapping of module paths")
    settings = {key: config[key] for key in config if key not in ("quant_method", "format_version", "modules")}
    for key in SETTINGS:
        if key not in settings:
            raise QuantizationConfigError(f"quantization_config: {key} is missing")
    base = LinearSpec(**_checked(settings, "quantization_config"))
    specs: dict[str, LinearSpec] = {}
    for path, diff in modules.items():
        where = f"quantization_config: modules[{path!r}]"
        if diff == SKIP:
            continue
        if not isinstance(diff, Mapping):
            raise QuantizationConfigError(f"{where} is {str(diff)[:40]!r}, wanted 'skip' or a mapping of settings")
        specs[path] = replace(base, **_checked(diff, where))
    return specs


def check_version(version: Any, where: str) -> None:
    """Raise FormatVersionError unless ``version`` is the one this package reads."""
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: format_version is {str(version)[:20]!r}, this package reads {FORMAT_VERSION}",
            hint="install the omniw4 release that wrote it, or quantize again",
        )


def linear_tensors(path: str, spec: LinearSpec) -> set[str]:
    """Names of the tensors a linear must have; ``<path>.bias`` may come in addition."""
    absent = {"bias"}
    if spec.rank == 0:
        absent |= {"proj_down", "proj_up"}
    if not spec.smooth:
        absent.add("smooth")
    if spec.scale_type != "integer":
        absent.add("row_scales")
    return {f"{path}.{part}" for part in PARTS if part not in absent}


def check_linear(path: str, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> StoredLinear:
    """Check names, dtypes and shapes of one quantized linear.

    Args:
        tensors: every tensor of the checkpoint by its full name.

    Raises:
        MissingTensorError, UnexpectedTensorError, TensorDtypeError, TensorShapeError: naming the tensor.
    """
    parts = {part: tensors[f"{path}.{part}"] for part in PARTS if f"{path}.{part}" in tensors}
    required = linear_tensors(path, spec)
    for name in sorted(required):
        if name not in tensors:
            raise MissingTensorError(f"tensor {name!r} of the quantized linear {path!r} is missing")
    for part in parts:
        if part != "bias" and f"{path}.{part}" not in required:
            raise UnexpectedTensorError(f"tensor '{path}.{part}' is there, though its linear has {_why(part, spec)}")
    q = parts["qweight"]
    _want_dtype(path, "qweight", q, ("U8",))
    if len(q.shape) != 2 or 0 in q.shape or q.shape[1] % (GROUP // 2):
        raise TensorShapeError(
            f"tensor '{path}.qweight' is {q}, wanted U8[N,K/2] with in_features K a multiple of {GROUP}"
        )
    n, k, r = q.shape[0], q.shape[1] * 2, spec.rank
    shapes = {"w_scales": (n, k // GROUP), "row_scales": (n,)}
    shapes |= {"proj_down": (k, r), "proj_up": (n, r), "smooth": (k,), "bias": (n,)}
    _want_dtype(path, "w_scales", parts["w_scales"], ("U8",) if spec.scale_type == "integer" else ("F16",))
    if "row_scales" in parts:
        _want_dtype(path, "row_scales", parts["row_scales"], ("F32",))
    floats = {part: info for part, info in parts.items() if part not in ("qweight", "w_scales", "row_scales")}
    for part, info in floats.items():
        _want_dtype(path, part, info, FLOATS)
        first = next(iter(floats))
        if info.dtype != floats[first].dtype:
            raise TensorDtypeError(
                f"tensor '{path}.{part}' is {info.dtype}, '{path}.{first}' is {floats[first].dtype}, wanted one dtype"
            )
    for part, shape in shapes.items():
        if part in parts and parts[part].shape != shape:
            wanted = f"[{','.join(map(str, shape))}]"
            raise TensorShapeError(f"tensor '{path}.{part}' is {parts[part]}, wanted {wanted} beside qweight {q}")
    return StoredLinear(n, k, "bias" in parts, sum(i.nbytes for part, i in parts.items() if part != "bias"))


def _why(part: str, spec: LinearSpec) -> str:
    if part == "row_scales":
        return f"scale_type {spec.scale_type}"
    return f"smooth {str(spec.smooth).lower()}" if part == "smooth" else f"rank {spec.rank}"


def _want_dtype(path: str, part: str, info: TensorInfo, allowed: tuple[str, ...]) -> None:
    if info.dtype not in allowed:
        raise TensorDtypeError(f"tensor '{path}.{part}' is {info}, wanted {' or '.join(allowed)}")


def _checked(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key, value in settings.items():
        if key not in SETTINGS:
            raise QuantizationConfigError(f"{where}: unknown key {str(key)[:40]!r}")
        wanted, allowed = SETTINGS[key]
        if not allowed(value):
            raise QuantizationConfigError(f"{where}: {key} is {str(value)[:40]!r}, wanted {wanted}")
    return dict(settings)
