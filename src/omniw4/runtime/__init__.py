"""Quantized models at work: ``W4A4Linear`` in any Hugging Face model, and the fused Qwen3 engine.

Imports nothing by itself; ``Qwen3Engine`` comes on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniw4.runtime.engine import Qwen3Engine

__all__ = ["Qwen3Engine"]


def __getattr__(name: str) -> Any:
    if name == "Qwen3Engine":
        from omniw4.runtime.engine import Qwen3Engine

        return Qwen3Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
