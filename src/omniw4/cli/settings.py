"""Flags to config: ``--set``, ``--override``, ``--include``, ``--skip`` over ``--config`` over the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from omniw4 import config
from omniw4.errors import UsageError


def load(source: str | None, assignments: Sequence[str] = (), flags: dict[str, Any] | None = None) -> config.Config:
    """The config of one run.

    Args:
        source: ``--config``.
        assignments: each ``--set`` as it was written, such as ``recipe.lowrank.rank=32``.
        flags: nested dict of what other flags set; None values are flags that were not given. They win over --set.
    """
    data = config.load(source).model_dump(mode="json")
    for text in assignments:
        data = config.merge(data, parse_assignment(text))
    return config.parse(config.merge(data, config.without_none(flags or {})), origin="command line")


def with_patterns(
    loaded: config.Config, include: Sequence[str], skip: Sequence[str], override: Sequence[str]
) -> config.Config:
    """The config with patterns of the command line after its own; of two overrides of a key the later one wins."""
    data = loaded.model_dump(mode="json")
    recipe = data["recipe"]
    recipe["include"] = [*recipe["include"], *include]
    recipe["skip"] = [*recipe["skip"], *skip]
    recipe["overrides"] = [*recipe["overrides"], *map(parse_override, override)]
    return config.parse(data, origin="command line")


def parse_assignment(text: str) -> dict[str, Any]:
    """``a.b.c=value`` to ``{"a": {"b": {"c": value}}}``; the value is read as YAML, so that 8, true and null mean that.

    Raises:
        UsageError: no ``=``, or an empty part of the key.
    """
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UsageError(f"--set wants KEY=VALUE, found {text!r}", hint="such as `--set recipe.lowrank.rank=32`")
    nested: Any = _value(value, "--set", text)
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def parse_override(text: str) -> dict[str, Any]:
    """``PATTERN:key=value,key=value`` to an entry of ``recipe.overrides``; the last colon ends the pattern.

    Raises:
        UsageError: not of this form.
    """
    pattern, colon, settings = text.rpartition(":")
    pairs = [pair.partition("=") for pair in settings.split(",")]
    if not colon or pattern in ("", "re") or not all(key.strip() and equals for key, equals, _ in pairs):
        raise UsageError(
            f"--override wants 'PATTERN:key=value,...', found {text!r}",
            hint="such as `--override '*.down_proj:act_bits=8'`",
        )
    return {"pattern": pattern, **{key.strip(): _value(value, "--override", text) for key, _, value in pairs}}


def _value(text: str, flag: str, whole: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UsageError(f"{flag} {whole!r}: {text!r} is not a value", hint="values are YAML: 8, true, [a, b]") from e
