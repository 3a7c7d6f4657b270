"""Capture of CUDA graphs, undisturbed by Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph(graph, **options)``, with garbage collected before and none collected meanwhile.

    A graph or a block of memory that a collection frees during a capture makes the capture invalid, and every launch
    after it fails with "a previous error during capture".
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if enabled:
            gc.enable()
