"""Layout ``mma_s8``: fragments of ``mma.sync.m16n8k32`` s8, weights as operand A, for sm_80 and newer.

The map is that of :mod:`omniw4.repack.widened`; a block of 64 output features is four warps of m16. The tokens, operand
B, are bytes in the order of rows: ``ldmatrix`` makes the fragments.
"""

from __future__ import annotations

import torch

from omniw4.errors import LayoutError
from omniw4.int4 import GROUP_SIZE
from omniw4.repack.axes import pad, round_up
from omniw4.repack.operands import check_dtype, check_shape
from omniw4.repack.widened import pack_widened, unpack_widened, unsupported_widened
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUT = "mma_s8"
VERSION = 1
N_TILE = 64
M_TILE = 16


def unsupported(spec: LinearSpec) -> str:
    """Why no kernel of this layout can run such a linear; empty when one can."""
    return unsupported_widened(spec, LAYOUT)


def pack(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order, N padded to 64; see :func:`omniw4.repack.widened.pack_widened`.

    Raises:
        LayoutError: tensors of the linear that do not fit together.
    """
    return pack_widened(linear, N_TILE)


def unpack(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear:
    """Inverse of :func:`pack`, bit for bit; see :func:`omniw4.repack.widened.unpack_widened`."""
    return unpack_widened(packed, spec, n, k, N_TILE)


def pack_activations(codes: torch.Tensor, a_scales: torch.Tensor, act_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens as the kernel reads them: the reference of what the quantizer kernel stores.

    Args:
        codes: ``[M, K]`` int8; with integer scales, these times the codes.
        a_scales: ``[M, K/64]`` float16 for 4 bits, ``[M, 1]`` for 8 bits; with integer scales ``[M, 1]`` float32.
        act_bits: 4 or 8; 8 also for what has integer scales.

    Returns:
        the codes as they are, and in float32 ``[K/64, M']`` or ``[M']``, M' being M rounded up to 16; padding is zero.

    Raises:
        LayoutError: shapes or dtypes that do not fit together.
    """
    if codes.dim() != 2 or codes.shape[1] % GROUP_SIZE:
        raise LayoutError(f"codes have shape {list(codes.shape)}, wanted [M, K] with K a multiple of {GROUP_SIZE}")
    check_dtype("codes", codes, torch.int8)
    if a_scales.dtype != torch.float32 or act_bits == 4:
        check_dtype("a_scales", a_scales, torch.float16)
    tokens, groups = codes.shape[0], codes.shape[1] // GROUP_SIZE
    check_shape("a_scales", a_scales, (tokens, groups if act_bits == 4 else 1))
    scales = pad(a_scales.float(), 0, round_up(tokens, M_TILE)).T.contiguous()
    return codes, scales if act_bits == 4 else scales[0]
