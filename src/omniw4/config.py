"""Typed configuration: loaded, merged and validated before anything expensive happens. Imports no torch.

A config file is a small YAML diff on ``configs/default.yaml``, which spells out and comments every key. The order of
precedence is: flags of the command line, then the file given with ``--config``, then the default.
"""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from omniw4.errors import ConfigError


def _not_a_bool(value: Any) -> Any:
    """To Python ``true`` is the number 1; to whoever wrote it, it is not."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "a number is wanted")
    return value


Whole = Annotated[int, BeforeValidator(_not_a_bool)]
Number = Annotated[float, BeforeValidator(_not_a_bool)]


def _number_or_search(value: Any) -> Any:
    """One sentence for both that are allowed; a union has a sentence for each."""
    if value == "search":
        return value
    with suppress(TypeError, ValueError, OverflowError):
        if 0 <= (number := float(_not_a_bool(value))) <= 1:
            return number
    raise PydanticCustomError("strength_type", "a number from 0 to 1, or search, is wanted")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Calibrate(_Section):
    """How text becomes statistics."""

    samples: Whole = Field(32, ge=1)
    seq_len: Whole = Field(1024, ge=8)
    batch_size: Whole = Field(1, ge=1)
    seed: Whole = Field(0, ge=0)
    bos: Literal["model", "always", "never"] = "model"


class Weights(_Section):
    bits: Literal[4] = 4
    scale: Literal["absmax", "search"] = "absmax"
    scale_type: Literal["float16", "integer"] = "float16"


class Activations(_Section):
    bits: Literal[4, 8, 16] = 4
    clip: Number = Field(1.0, gt=0, le=1)


class Smooth(_Section):
    """``smooth_j = m(X_j)^strength / m(W_j)^(1-strength)`` with m the absmax (SmoothQuant) or the RMS; 0 is off.

    ``search``: for each input the strength with the least modelled error (:mod:`omniw4.quantize.smooth`).
    """

    strength: Annotated[float | Literal["search"], PlainValidator(_number_or_search)] = 0.0
    measure: Literal["absmax", "rms"] = "absmax"

    @property
    def enabled(self) -> bool:
        """Whether linears have a smoothing vector."""
        return self.strength != 0


class Gptq(_Section):
    enabled: bool = True
    hessian: Literal["plain", "normalized"] = "plain"
    damp: Number = Field(0.01, gt=0)
    order: Literal["natural", "activation"] = "natural"
    block_size: Whole = Field(128, ge=64, multiple_of=64)
    sweeps: Whole = Field(0, ge=0, le=100)

    @model_serializer(mode="wrap")
    def _without_natural_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The natural order goes without saying: recipes stored before there was another one are equal to today's."""
        data: dict[str, Any] = handler(self)
        if data.get("order") == "natural":
            del data["order"]
        return data


class LowRank(_Section):
    rank: Whole = Field(16, ge=0, le=256)
    rounds: Whole = Field(3, ge=1)
    init: Literal["zero", "svd_weight"] = "zero"
    whiten: Literal["none", "diagonal", "full"] = "none"


class Override(_Section):
    """A diff of the recipe for the linears a pattern matches."""

    pattern: str
    act_bits: Literal[4, 8, 16] | None = None
    act_clip: Number | None = Field(None, gt=0, le=1)
    rank: Whole | None = Field(None, ge=0, le=256)
    rotation: Literal["none", "hadamard64"] | None = None
    scale_type: Literal["float16", "integer"] | None = None


class Distill(_Section):
    """Training of the low-rank branch and the scales against the original model; 0 steps is off."""

    steps: Whole = Field(0, ge=0)
    lr: Number = Field(4e-3, gt=0)
    scales: bool = True
    warmup: Whole = Field(10, ge=0)
    samples: Whole = Field(256, ge=1)
    held_out: Whole = Field(16, ge=1)
    seq_len: Whole = Field(1024, ge=8)
    batch_size: Whole = Field(4, ge=1)
    micro_batch: Whole = Field(4, ge=1)
    eval_every: Whole = Field(20, ge=1)
    save_every: Whole = Field(20, ge=1)
    patience: Whole = Field(5, ge=0)
    max_grad_norm: Number = Field(1.0, gt=0)
    checkpointing: bool = False
    seed: Whole = Field(0, ge=0)


class Recipe(_Section):
    """What is done to every linear; stored whole in the checkpoint."""

    group_size: Whole = Field(64, ge=1)
    weights: Weights = Weights()
    activations: Activations = Activations()
    rotation: Literal["none", "hadamard64"] = "hadamard64"
    smooth: Smooth = Smooth()
    gptq: Gptq = Gptq()
    lowrank: LowRank = LowRank()
    distill: Distill = Distill()
    include: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def needs_stats(self) -> bool:
        """Whether it takes calibration statistics."""
        return self.gptq.enabled or self.smooth.enabled or self.lowrank.whiten != "none"


class Gates(_Section):
    """Verdicts of ``omniw4 verify``; a gate that is null is not applied."""

    max_perplexity_ratio: Number | None = Field(None, gt=0)
    max_kl: Number | None = Field(None, ge=0)
    min_argmax_agreement: Number | None = Field(None, ge=0, le=1)
    max_layer_error: Number | None = Field(None, ge=0)


class Verify(_Section):
    windows: Whole = Field(16, ge=1)
    seq_len: Whole = Field(1024, ge=8)
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
    """Validate a plain dict; raises ConfigError naming every wrong key and value."""
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        found = e.errors()
        hints = [hint for p in found if p["type"] in _UNKNOWN and (hint := _keys_there(p["loc"]))]
        problems = list(dict.fromkeys(map(_told, found)))  # each sentence once: a union has an error a member
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"config {origin!r}: {'; '.join(problems[:_SHOWN])}{more}", hint=hints[0] if hints else ""
        ) from e


_SHOWN = 12  # problems that are spelled out: a file of another kind has hundreds
_UNKNOWN = ("extra_forbidden", "invalid_key")
_WANTED = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "a finite number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "number_type": "a number",
    "strength_type": "a number from 0 to 1, or search",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}


def _told(problem: Any) -> str:
    """One problem of pydantic's as a sentence that names key, value and what is wanted."""
    loc, kind, value = problem["loc"], problem["type"], problem["input"]
    name = ".".join(map(str, loc)) or "the whole of it"
    if kind in _UNKNOWN:
        near = difflib.get_close_matches(str(loc[-1]), _keys(loc[:-1]), n=1)
        return f"there is no key {name}" + (f", did you mean {near[0]}?" if near else "")
    if kind == "missing":
        return f"{name} is missing"
    if kind == "literal_error":
        return f"{name} is {_as_yaml(value)}, wanted {problem['ctx']['expected'].replace(chr(39), '')}"
    wanted = _WANTED.get(kind, "").format(**problem.get("ctx", {}))
    return f"{name} is {_as_yaml(value)}{f', wanted {wanted}' if wanted else ': ' + problem['msg']}"


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _keys_there(loc: tuple[int | str, ...]) -> str:
    keys = _keys(loc[:-1])
    where = ".".join(map(str, loc[:-1]))
    return f"the keys{f' of {where}' if where else ''} are {', '.join(keys)}" if keys else ""


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    """Names of the keys that the section at ``loc`` has; positions in a list count for nothing."""
    section: type[BaseModel] | None = Config
    for part in loc:
        if section is None or isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        section = _section_in(field.annotation) if field is not None else None
    return list(section.model_fields) if section is not None else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section_in(one)) is not None), None)


def merge(base: dict[str, Any], diff: dict[str, Any]) -> dict[str, Any]:
    """A new dict: values of ``diff`` over ``base``, dicts merged key by key, lists replaced whole."""
    merged = dict(base)
    for key, value in diff.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def difference(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """One line ``key: old -> new`` for every leaf in which two nested dicts differ; of hashes, the key alone."""
    lines: list[str] = []
    for key in sorted({*a, *b}):
        left, right, name = a.get(key), b.get(key), f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict):
            lines += difference(left, right, f"{name}.")
        elif left != right:
            hashes = all(value is None or _is_hash(value) for value in (left, right))
            lines.append(f"{name} is another" if hashes else f"{name}: {_short(left)} -> {_short(right)}")
    return lines


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _short(value: Any) -> str:
    return "some" if isinstance(value, dict) else "none" if value is None else repr(value)


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
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as e:
        raise ConfigError(f"cannot read config {str(path)!r}: {_reason(e)}", hint=_YAML_HINT) from e
    if data is not None and not isinstance(data, dict):
        kind = {"list": "a list", "str": "a text"}.get(type(data).__name__, f"a {type(data).__name__}")
        raise ConfigError(f"config {str(path)!r} holds {kind}, wanted sections such as recipe", hint=_YAML_HINT)
    return data or {}


_YAML_HINT = "a config is UTF-8 YAML, a diff on configs/default.yaml, such as `recipe: {lowrank: {rank: 32}}`"


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start})"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"it is not YAML: {error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def without_none(data: dict[str, Any]) -> dict[str, Any]:
    """A nested dict without the keys whose value is None, and without dicts that are empty then."""
    kept = {k: without_none(v) if isinstance(v, dict) else v for k, v in data.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}
