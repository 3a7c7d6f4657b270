"""Patterns over full module paths, as ``--include``, ``--skip`` and ``--override`` take them.

A pattern is a glob over the whole path (``*`` also crosses dots: ``*.down_proj``, ``model.layers.3.*``), or, with
the prefix ``re:``, a regular expression that must match the whole path (``re:.*layers\\.[0-3]\\..*``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

from omniw4.errors import PatternError


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """A predicate over full paths.

    Raises:
        PatternError: the regular expression is malformed, or the pattern is empty.
    """
    if not pattern or pattern == "re:":
        raise PatternError("empty pattern", hint="write a glob such as '*.down_proj' or 're:' and a regular expression")
    expression = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError, RecursionError) as e:
        raise PatternError(f"pattern {pattern!r} is not a valid regular expression: {e}") from e
    return lambda path: compiled.fullmatch(path) is not None


def globs_for(wanted: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Globs that match exactly the ``wanted`` of all ``paths``: one for each name that repeats in every block.

    ``model.layers.0.mlp.down_proj`` and its likes become ``*.mlp.down_proj``; a path stands for itself where such a
    glob would match others too.
    """
    wanted, paths = list(wanted), list(paths)
    globs: dict[str, None] = {}
    for path in wanted:
        glob = re.sub(r"^(?:.*\.)?\d+\.", "*.", path)
        exact = set(filter(compile_pattern(glob), paths)) <= set(wanted)
        globs.setdefault(glob if exact else path)
    return list(globs)


def select(pattern: str, paths: Iterable[str], *, flag: str) -> list[str]:
    """The paths a pattern matches, in their order.

    Args:
        flag: the flag or config key the pattern came from, named in the error.

    Raises:
        PatternError: nothing matches; the message shows some of the paths there are.
    """
    paths = list(paths)
    matches = compile_pattern(pattern)
    chosen = [path for path in paths if matches(path)]
    if not chosen:
        shown = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
        raise PatternError(
            f"{flag} pattern {pattern!r} matches none of {len(paths)} linears",
            hint=f"patterns are globs over the full path, such as {shown}" if paths else "",
        )
    return chosen
