"""Quantized models at work: ``W4A4Linear`` in any Hugging Face model, and the fused Qwen3 engine.

Imports nothing by itself; what is named here comes on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniw4.runtime.engine import Qwen3Engine
    from omniw4.runtime.qwen3_patch import accelerate, restore

__all__ = ["Qwen3Engine", "accelerate", "restore"]

_HOMES = {"Qwen3Engine": "engine", "accelerate": "qwen3_patch", "restore": "qwen3_patch"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"omniw4.runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
