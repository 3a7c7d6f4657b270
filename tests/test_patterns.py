"""Globs and regular expressions over full module paths."""

from __future__ import annotations

import pytest

from omniw4.errors import PatternError
from omniw4.patterns import compile_pattern, globs_for, select

PATHS = [f"model.layers.{i}.{name}" for i in range(12) for name in ("self_attn.q_proj", "mlp.down_proj")]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*", 24),
        ("*.down_proj", 12),
        ("model.layers.3.*", 2),
        ("model.layers.?.mlp.down_proj", 10),
        ("model.layers.[0-3].*", 8),
        ("model.layers.1.mlp.down_proj", 1),
        (r"re:.*layers\.1\..*", 2),
        (r"re:.*layers\.(10|11)\..*proj", 4),
        ("re:.*", 24),
    ],
)
def test_select(pattern: str, count: int) -> None:
    chosen = select(pattern, PATHS, flag="--skip")
    assert len(chosen) == count
    assert chosen == [p for p in PATHS if p in chosen], "the order is that of the paths"


@pytest.mark.parametrize("pattern", ["down_proj", "layers.3", "re:layers", r"re:.*layers\.3", "MODEL.*", "*.q_proj "])
def test_a_pattern_is_over_the_whole_path(pattern: str) -> None:
    with pytest.raises(PatternError, match="matches none of 24 linears") as caught:
        select(pattern, PATHS, flag="--skip")
    assert repr(pattern) in caught.value.message
    assert caught.value.message.startswith("--skip")
    assert PATHS[0] in caught.value.hint


def test_nothing_to_match() -> None:
    with pytest.raises(PatternError, match="none of 0 linears"):
        select("*", [], flag="--include")


@pytest.mark.parametrize("pattern", ["", "re:", "re:(", "re:*", "re:[a"])
def test_malformed(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(pattern)


def test_dots_of_a_glob_are_dots() -> None:
    assert not compile_pattern("a.b")("axb")
    assert compile_pattern("re:a.b")("axb")


def test_globs_name_what_repeats_in_every_block_and_nothing_else() -> None:
    paths = [f"model.layers.{i}.mlp.{name}" for i in range(12) for name in ("up_proj", "down_proj")] + ["lm_head"]
    down = [path for path in paths if path.endswith("down_proj")]
    assert globs_for(down, paths) == ["*.mlp.down_proj"]
    assert globs_for(paths, paths) == ["*.mlp.up_proj", "*.mlp.down_proj", "lm_head"]
    assert globs_for(down[:2], paths) == down[:2], "a glob would match the other blocks too"
    assert globs_for([], paths) == []
