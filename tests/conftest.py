"""Shared by all tests: offline, few threads, and the `gpu` marker."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# Before anything imports torch or transformers, in this process and in those the tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # no pool of threads to load with: verbs run in forked processes
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# The package omnivoice imports torchaudio, and transformers looks once, when it is imported, whether there is one.
if importlib.util.find_spec("torchaudio") is None:
    STUBS = str(Path(__file__).resolve().parent / "stubs")
    sys.path.append(STUBS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), STUBS)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where they cannot run, and say why; with OMNIW4_REQUIRE_GPU=1 let them fail instead."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("OMNIW4_REQUIRE_GPU"):
        return
    reason = _why_no_gpu()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    from omniw4.ops import extension

    reason = extension.why_not_on(torch.device("cuda", 0))
    return f"{reason}; run make kernels" if reason else ""
