"""Canonical tensors to the order in which tensor-core fragments read them, and back; index maps only.

``get(name)`` gives a layout (``pack``, ``unpack``), ``auto`` chooses one for a GPU, and :mod:`omniw4.repack.cache`
keeps a packed checkpoint beside the canonical one.
"""

from omniw4.repack.layouts import LAYOUTS, Capability, Layout, auto, explain_auto, get, parse_arch

__all__ = ["LAYOUTS", "Capability", "Layout", "auto", "explain_auto", "get", "parse_arch"]
