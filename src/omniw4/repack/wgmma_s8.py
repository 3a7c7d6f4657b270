"""Layout ``wgmma_s8``: register fragments of ``wgmma.m64nNk32`` s8, weights as operand A, for sm_90a.

The map is that of :mod:`omniw4.repack.widened`; two consumer warpgroups of m64 share a tile of 128 output features.
"""

from __future__ import annotations

import torch

from omniw4.repack.widened import pack_widened, unpack_widened, unsupported_widened
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUT = "wgmma_s8"
VERSION = 1
N_TILE = 128


def unsupported(spec: LinearSpec) -> str:
    """Why no kernel of this layout can run such a linear; empty when one can."""
    return unsupported_widened(spec, LAYOUT)


def pack(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order, N padded to 128; see :func:`omniw4.repack.widened.pack_widened`."""
    return pack_widened(linear, N_TILE)


def unpack(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear:
    """Inverse of :func:`pack`, bit for bit; see :func:`omniw4.repack.widened.unpack_widened`."""
    return unpack_widened(packed, spec, n, k, N_TILE)
