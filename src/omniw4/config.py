"""Typed configuration: loaded, merged and validated before anything expensive happens. Imports no torch.

A config file is a small YAML diff on ``configs/default.yaml``, which spells out and comments every key. The order of
precedence is: flags of the command line, then the file given with ``--config``, then the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omniw4.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Calibrate(_Section):
    """How text becomes statistics."""

    samples: int = Field(32, ge=1)
    seq_len: int = Field(1024, ge=8)
    batch_size: int = Field(1, ge=1)
    seed: int = 0
    bos: Literal["model", "always", "never"] = "model"


class Weights(_Section):
    bits: Literal[4] = 4
    scale: Literal["absmax", "search"] = "absmax"


class Activations(_Section):
    bits: Literal[4, 8, 16] = 4
    clip: float = Field(1.0, gt=0, le=1)


class Smooth(_Section):
    """``smooth_j = m(X_j)^strength / m(W_j)^(1-strength)`` with m the absmax (SmoothQuant) or the RMS; 0 is off."""

    strength: float = Field(0.0, ge=0, le=1)
    measure: Literal["absmax", "rms"] = "absmax"


class Gptq(_Section):
    enabled: bool = True
    hessian: Literal["plain", "normalized"] = "plain"
    damp: float = Field(0.01, gt=0)
    block_size: int = Field(128, ge=64, multiple_of=64)


class LowRank(_Section):
    rank: int = Field(16, ge=0, le=256)
    rounds: int = Field(3, ge=1)
    init: Literal["zero", "svd_weight"] = "zero"


class Override(_Section):
    """A diff of the recipe for the linears a pattern matches."""

    pattern: str
    act_bits: Literal[4, 8, 16] | None = None
    act_clip: float | None = Field(None, gt=0, le=1)
    rank: int | None = Field(None, ge=0, le=256)
    rotation: Literal["none", "hadamard64"] | None = None


class Recipe(_Section):
    """What is done to every linear; stored whole in the checkpoint."""

    group_size: int = Field(64, ge=1)
    weights: Weights = Weights()
    activations: Activations = Activations()
    rotation: Literal["none", "hadamard64"] = "hadamard64"
    smooth: Smooth = Smooth()
    gptq: Gptq = Gptq()
    lowrank: LowRank = LowRank()
    include: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()


class Gates(_Section):
    """Verdicts of ``omniw4 verify``; a gate that is null is not applied."""

    max_perplexity_ratio: float | None = Field(None, gt=0)
    max_kl: float | None = Field(None, ge=0)
    min_argmax_agreement: float | None = Field(None, ge=0, le=1)
    max_layer_error: float | None = Field(None, ge=0)


class Verify(_Section):
    windows: int = Field(16, ge=1)
    seq_len: int = Field(1024, ge=8)
    gates: Gates = Gates()


class Config(_Section):
    """One whole config: a section for each verb that reads one."""

    calibrate: Calibrate = Calibrate()
    recipe: Recipe = Recipe()
    verify: Verify = Verify()


def config_dir() -> Path:
    """Where the shipped configs lie: inside the installed package, or at the top of a checkout."""
    here = Path(__file__).resolve().parent
    packaged = here / "configs"
    return packaged if packaged.is_dir() else here.parents[1] / "configs"


def load(source: str | Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read a config: default, then file, then overrides.

    Args:
        source: path of a YAML file, or the name of a shipped config (``"seed"``); None for the default alone.
        overrides: nested dict of values that flags set; None values are ignored.

    Raises:
        ConfigError: missing file, invalid YAML, unknown key, or a value out of range; all problems in one message.
    """
    merged = _read_yaml(config_dir() / "default.yaml")
    if source is not None:
        merged = merge(merged, _read_yaml(_find(source)))
    merged = merge(merged, without_none(overrides or {}))
    return parse(merged, origin=str(source or "default"))


def parse(data: dict[str, Any], *, origin: str) -> Config:
    """Validate a plain dict; raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors())
        raise ConfigError(
            f"config {origin!r} is not valid: {problems}", hint="configs/default.yaml lists every key"
        ) from e


def merge(base: dict[str, Any], diff: dict[str, Any]) -> dict[str, Any]:
    """A new dict: values of ``diff`` over ``base``, dicts merged key by key, lists replaced whole."""
    merged = dict(base)
    for key, value in diff.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def difference(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """One line ``key: old -> new`` for every leaf in which two nested dicts differ."""
    lines: list[str] = []
    for key in sorted({*a, *b}):
        left, right, name = a.get(key), b.get(key), f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict):
            lines += difference(left, right, f"{name}.")
        elif left != right:
            lines.append(f"{name}: {left!r} -> {right!r}")
    return lines


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    shipped = config_dir() / f"{source}.yaml"
    if path.suffix == "" and path.parent == Path(".") and shipped.is_file():
        return shipped
    names = ", ".join(sorted(p.stem for p in config_dir().glob("*.yaml")))
    raise ConfigError(f"no config file {str(source)!r}", hint=f"give a path, or one of the shipped configs: {names}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        reason = " ".join(str(e).split())
        raise ConfigError(f"cannot read config {str(path)!r}: {reason}") from e
    if not isinstance(data or {}, dict):
        raise ConfigError(f"config {str(path)!r} holds a {type(data).__name__}, wanted a mapping of sections")
    return data or {}


def without_none(data: dict[str, Any]) -> dict[str, Any]:
    """A nested dict without the keys whose value is None, and without dicts that are empty then."""
    kept = {k: without_none(v) if isinstance(v, dict) else v for k, v in data.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}
