"""Laws of configs, patterns, names and sizes."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from omniw4 import config
from omniw4.checkpoint import parse_size
from omniw4.checkpoint.schema import natural_order
from omniw4.errors import ConfigError, PatternError
from omniw4.patterns import compile_pattern, select

LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


def tree(depth: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Nested dicts in which a name is always a section or always a value, as the names of a config are."""
    values = st.dictionaries(st.sampled_from(["a", "b", "c"]), LEAF, max_size=3)
    if depth == 0:
        return values
    sections = st.dictionaries(st.sampled_from(["s", "t"]), tree(depth - 1), max_size=2)
    return st.builds(lambda one, other: {**one, **other}, values, sections)


@examples(100)
@given(tree(), tree(), tree())
def test_merge_is_a_monoid(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    assert config.merge(a, {}) == a == config.merge({}, a)
    assert config.merge(a, a) == a
    assert config.merge(config.merge(a, b), c) == config.merge(a, config.merge(b, c))


@examples(100)
@given(tree(), tree())
def test_difference_is_empty_only_between_equals(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert config.difference(a, a) == []
    assert config.difference(config.merge(a, b), config.merge(a, b)) == []
    if config.merge(a, b) != a:
        assert config.difference(a, config.merge(a, b)) or _only_absent(a, config.merge(a, b))


def _only_absent(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two dicts differ in keys that are absent here and None or without content there."""
    kept = lambda data: config.without_none(data)  # noqa: E731
    return kept(a) == kept(b)


@examples(60)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rank": st.integers(-10, 300),
            "rounds": st.integers(-1, 5),
            "init": st.sampled_from(["zero", "svd_weight", "x", None, 3]),
            "unknown": st.none(),
        },
    )
)
def test_a_config_is_valid_and_comes_back_or_the_error_names_the_key(lowrank: dict[str, Any]) -> None:
    valid = (
        0 <= lowrank.get("rank", 0) <= 256
        and lowrank.get("rounds", 1) >= 1
        and lowrank.get("init", "zero") in ("zero", "svd_weight")
        and "unknown" not in lowrank
    )
    if not valid:
        with pytest.raises(ConfigError, match=r"recipe\.lowrank\.(rank|rounds|init|unknown)"):
            config.parse({"recipe": {"lowrank": lowrank}}, origin="test")
        return
    parsed = config.parse({"recipe": {"lowrank": lowrank}}, origin="test")
    dumped = parsed.model_dump(mode="json")
    assert config.parse(dumped, origin="again") == parsed
    assert all(dumped["recipe"]["lowrank"][key] == value for key, value in lowrank.items())


NAME = st.text(st.sampled_from(string.ascii_lowercase + string.digits + "_"), min_size=1, max_size=6)
PATH = st.lists(NAME, min_size=1, max_size=5).map(".".join)
GLOB = st.lists(st.sampled_from(["*", "?", ".", "a", "b", "layers", "3"]), min_size=1, max_size=6).map("".join)


@examples(150)
@given(GLOB, PATH)
def test_a_glob_matches_as_its_definition_says(pattern: str, path: str) -> None:
    """Against a matcher of a few lines: ``*`` is any run of characters, ``?`` any one."""

    def matches(p: str, s: str) -> bool:
        if not p:
            return not s
        if p[0] == "*":
            return any(matches(p[1:], s[i:]) for i in range(len(s) + 1))
        return bool(s) and p[0] in ("?", s[0]) and matches(p[1:], s[1:])

    assert compile_pattern(pattern)(path) == matches(pattern, path) == fnmatch.fnmatchcase(path, pattern)


@examples(60)
@given(st.lists(PATH, min_size=1, max_size=8, unique=True), st.integers(0, 7))
def test_a_path_selects_itself_alone(paths: list[str], index: int) -> None:
    path = paths[index % len(paths)]
    assert select(path, paths, flag="--skip") == [path]
    assert select("re:" + re.escape(path), paths, flag="--skip") == [path]
    assert select("*", paths, flag="--skip") == paths
    with pytest.raises(PatternError, match="matches none"):
        select(path + "x", [p for p in paths if p != path + "x"], flag="--skip")


@examples(100)
@given(st.text(max_size=12))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    for pattern in (text, f"re:{text}"):
        with contextlib.suppress(PatternError):
            assert compile_pattern(pattern)("model.layers.0.q_proj") in (True, False)


@examples(100)
@given(st.lists(st.text(max_size=8) | PATH, max_size=12, unique=True), st.randoms(use_true_random=False))
def test_natural_order_is_total(names: list[str], random: object) -> None:
    """Names that differ have different keys, so that an order does not depend on where it began."""
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sorted(shuffled, key=natural_order) == sorted(names, key=natural_order)


@examples(60)
@given(st.integers(0, 10**12), st.integers(0, 10**12), NAME)
def test_natural_order_counts(a: int, b: int, name: str) -> None:
    keys = [natural_order(f"{name}.{number}.x") for number in (a, b)]
    assert (keys[0] < keys[1]) == (a < b)


@examples(60)
@given(st.integers(1, 10**6), st.sampled_from(["", "K", "M", "G", "Ki", "MiB", "GB", "gib"]))
def test_a_size_is_read_as_written(number: int, unit: str) -> None:
    prefix = unit.upper().removesuffix("B")
    factor = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}[prefix]
    assert parse_size(f"{number}{unit}") == number * factor
    assert parse_size(f" {number} {unit} ") == number * factor
