"""Flags to config, and which of them wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniw4.cli import settings
from omniw4.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("recipe.lowrank.rank=32", {"recipe": {"lowrank": {"rank": 32}}}),
        ("a=null", {"a": None}),
        ("a=true", {"a": True}),
        ("a=0.5", {"a": 0.5}),
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ("a=", {"a": None}),
    ],
)
def test_assignment(text: str, wanted: dict[str, Any]) -> None:
    assert settings.parse_assignment(text) == wanted


@pytest.mark.parametrize("text", ["", "a", "=1", ".a=1", "a..b=1", "a=[1"])
def test_malformed_assignment(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        settings.parse_assignment(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*.down_proj:act_bits=8", {"pattern": "*.down_proj", "act_bits": 8}),
        ("*:rank=0,rotation=none", {"pattern": "*", "rank": 0, "rotation": "none"}),
        ("re:.*(?:q|k)_proj:act_clip=0.9", {"pattern": "re:.*(?:q|k)_proj", "act_clip": 0.9}),
    ],
)
def test_override(text: str, wanted: dict[str, Any]) -> None:
    assert settings.parse_override(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "*.down_proj", "*.down_proj:", ":act_bits=8", "re:act_bits=8", "*:act_bits", "*:=8"]
)
def test_malformed_override(text: str) -> None:
    with pytest.raises(UsageError, match="--override"):
        settings.parse_override(text)


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("calibrate: {samples: 1, seq_len: 100, seed: 1}\nverify: {gates: {max_kl: 0.5}}")
    loaded = settings.load(
        str(file),
        ["calibrate.samples=2", "calibrate.seq_len=200", "calibrate.seq_len=300", "verify.gates.max_kl=null"],
        {"calibrate": {"samples": 3, "seed": None}},
    )
    assert loaded.calibrate.samples == 3, "a flag wins over --set"
    assert loaded.calibrate.seq_len == 300, "a later --set wins over an earlier one and the file"
    assert loaded.calibrate.seed == 1, "a flag that was not given changes nothing"
    assert loaded.verify.gates.max_kl is None, "--set can take a gate of the file away"


@pytest.mark.parametrize(
    ("text", "named"),
    [("recipe.lowrank.rnak=8", "rnak"), ("recipe.lowrank.rank=999", "recipe.lowrank.rank"), ("x=1", "x")],
)
def test_a_wrong_key_or_value_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings.load(None, [text])


def test_patterns_come_after_those_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: {skip: [a], overrides: [{pattern: '*', rank: 8}]}")
    loaded = settings.with_patterns(settings.load(str(file)), ["i"], ["b"], ["*:rank=4"])
    assert loaded.recipe.include == ("i",)
    assert loaded.recipe.skip == ("a", "b")
    assert [o.rank for o in loaded.recipe.overrides] == [8, 4]


def test_an_override_of_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="act_bitz"):
        settings.with_patterns(settings.load(None), [], [], ["*:act_bitz=8"])
