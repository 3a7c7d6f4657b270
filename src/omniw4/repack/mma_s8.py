"""Layout ``mma_s8``: fragments of ``mma.sync.m16n8k32`` s8, weights as operand A, for sm_80 and newer.

The map is that of :mod:`omniw4.repack.widened`; a block of 64 output features is four warps of m16.
"""

from __future__ import annotations

import torch

from omniw4.repack.operands import no_integer_scales, refuse_integer_scales
from omniw4.repack.widened import pack_widened, unpack_widened, unsupported_widened
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUT = "mma_s8"
VERSION = 1
N_TILE = 64


def unsupported(spec: LinearSpec) -> str:
    """Why no kernel of this layout can run such a linear; empty when one can."""
    return unsupported_widened(spec, LAYOUT) or no_integer_scales(spec, LAYOUT)


def pack(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order, N padded to 64; see :func:`omniw4.repack.widened.pack_widened`.

    Raises:
        LayoutError: tensors of the linear that do not fit together, or integer group scales.
    """
    refuse_integer_scales(linear.spec, LAYOUT)
    return pack_widened(linear, N_TILE)


def unpack(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear:
    """Inverse of :func:`pack`, bit for bit; see :func:`omniw4.repack.widened.unpack_widened`."""
    return unpack_widened(packed, spec, n, k, N_TILE)
