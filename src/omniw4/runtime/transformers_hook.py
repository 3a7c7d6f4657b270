"""Register quant_method "omniw4" with transformers as soon as both packages are imported, in either order.

``import omniw4`` must not cost the seconds that importing torch and transformers takes, so nothing is imported here:
a finder on ``sys.meta_path`` waits for transformers' registry and runs :mod:`omniw4.runtime.hf` after it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"


def install() -> None:
    """Register now if the registry is there, otherwise when it is imported."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    try:
        importlib.import_module("omniw4.runtime.hf")
    except ImportError as e:  # a transformers whose registry is another must still be importable
        warnings.warn(f"omniw4 could not register with transformers: {e}", stacklevel=2)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()
