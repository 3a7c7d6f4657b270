"""A capture keeps the garbage collector out, and lets it in again, whatever happens."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from omniw4.cuda_graph import capture


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    options: list[Any] = []

    @contextmanager
    def graph(graph: object, **kwargs: Any):
        options.append((graph, kwargs, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return options


def test_garbage_is_collected_before_and_not_meanwhile(seen: list[Any]) -> None:
    garbage = Cycle()
    alive = weakref.ref(garbage)
    del garbage
    with capture("graph", pool=3):  # type: ignore[arg-type]
        assert alive() is None
        assert not gc.isenabled()
    assert gc.isenabled()
    assert seen == [("graph", {"pool": 3}, False)]


def test_the_collector_is_back_after_an_error_and_stays_off_where_it_was(seen: list[Any]) -> None:
    with pytest.raises(ValueError, match="no"), capture("graph"):  # type: ignore[arg-type]
        raise ValueError("no")
    assert gc.isenabled()
    gc.disable()
    try:
        with capture("graph"):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
