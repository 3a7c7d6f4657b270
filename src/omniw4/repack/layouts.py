"""Which layouts there are, and which one a GPU wants."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import torch

from omniw4.errors import LayoutError, UnsupportedGPUError
from omniw4.repack import mma_s4, mma_s8, wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear

Capability = tuple[int, int]

_NATIVE_S4 = {(8, 0), (8, 6), (8, 7), (8, 9)}
_WGMMA = {(9, 0)}


class Layout(Protocol):
    """What a layout module offers."""

    LAYOUT: str
    VERSION: int  # raised whenever the same linear would pack to other bytes
    N_TILE: int

    def unsupported(self, spec: LinearSpec) -> str: ...

    def pack(self, linear: QuantizedLinear) -> dict[str, torch.Tensor]: ...

    def unpack(self, packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear: ...


LAYOUTS: dict[str, Layout] = {"mma_s4": mma_s4, "mma_s8": mma_s8, "wgmma_s8": wgmma_s8}


def get(name: str) -> Layout:
    """The layout of that name; raises LayoutError listing the names there are."""
    if name not in LAYOUTS:
        raise LayoutError(f"no layout {name!r}", hint=f"--layout takes one of: {', '.join(LAYOUTS)}, auto")
    return LAYOUTS[name]


def auto(capability: Capability | None, specs: Iterable[LinearSpec] = (LinearSpec(),)) -> str:
    """The layout of the fastest kernel family a GPU runs.

    Args:
        capability: the GPU's (major, minor), or None on a machine without one. The CPU reads the canonical layout
            and needs none of these; packing there prepares the folder for a GPU that is not known, so the answer is
            ``mma_s8``, the one layout that every supported GPU runs.
        specs: of the checkpoint's linears. ``mma_s4`` knows neither integer group scales nor 8-bit activations; where
            none of the linears can run so, the answer is ``mma_s8``.

    Raises:
        UnsupportedGPUError: older than sm_80.
    """
    if capability is None:
        return mma_s8.LAYOUT
    if capability < (8, 0):
        raise UnsupportedGPUError(
            f"a GPU of compute capability {capability[0]}.{capability[1]} has none of the instructions omniw4 needs, "
            "8.0 or newer is wanted",
            hint="the CPU of that machine can run it, with `--device cpu`",
        )
    if capability in _WGMMA:
        return wgmma_s8.LAYOUT
    fits = any(not mma_s4.unsupported(spec) for spec in specs)
    return mma_s4.LAYOUT if capability in _NATIVE_S4 and fits else mma_s8.LAYOUT


def explain_auto(capability: Capability | None, specs: Iterable[LinearSpec] = (LinearSpec(),)) -> str:
    """One sentence on why :func:`auto` answers as it does, for the user who did not name a layout."""
    name = auto(capability, specs)
    if capability is None:
        return (
            f"auto chose {name}: no GPU here, and every supported GPU runs this one; "
            "`--arch 90`, for example, packs what is fastest on that GPU"
        )
    native = capability in _NATIVE_S4
    why = {
        mma_s4.LAYOUT: "multiplies INT4 natively",
        mma_s8.LAYOUT: "multiplies these linears as INT8" if native else "multiplies INT8 natively and INT4 not",
        wgmma_s8.LAYOUT: "has warpgroup MMA",
    }[name]
    return f"auto chose {name}: a GPU of compute capability {capability[0]}.{capability[1]} {why}"


def what_fits(specs: Iterable[LinearSpec]) -> str:
    """A hint for linears that a layout does not hold: which layouts do."""
    chosen = list(specs)
    names = [name for name, layout in LAYOUTS.items() if any(not layout.unsupported(spec) for spec in chosen)]
    if not names:
        return "omniw4 runs such linears from the canonical tensors, without repacking"
    return f"give {' or '.join(f'--layout {name}' for name in names)}"


def parse_arch(arch: str) -> Capability:
    """``"90"``, ``"sm_90a"``, ``"sm90"`` or ``"9.0"`` to (9, 0).

    Raises:
        LayoutError: not of these forms.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", arch.strip().lower())
    if match is None:
        raise LayoutError(f"cannot read the GPU architecture {arch!r}", hint="write it as 90, sm_90a or 9.0")
    return int(match[1]), int(match[2])
