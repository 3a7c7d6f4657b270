"""omniw4: W4A4 quantization and inference for Qwen3-like models."""

from typing import TYPE_CHECKING, Any

from omniw4.runtime import transformers_hook as _transformers_hook

if TYPE_CHECKING:
    from omniw4.runtime.load import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

_transformers_hook.install()


def __getattr__(name: str) -> Any:
    """``omniw4.load``, imported on first use: torch stays out of ``omniw4 --help``."""
    if name == "load":
        from omniw4.runtime.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
