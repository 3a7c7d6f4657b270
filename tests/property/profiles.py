"""How many examples: the same few every time, or with ``HYPOTHESIS_PROFILE=long`` new ones, many times as many."""

from __future__ import annotations

import os

from hypothesis import settings

_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def examples(count: int) -> settings:
    """Decorator for a property; in the long profile it is tried fifty times as often."""
    return settings(max_examples=count * (50 if _LONG else 1), derandomize=not _LONG, deadline=None)
