"""Weights as the register operand A of an s8 MMA: ``Yᵀ = W·Xᵀ``, nibbles stored so that two instructions widen them.

The layouts ``mma_s8`` and ``wgmma_s8`` share this map of the codes: a warpgroup's m64 fragment of
``wgmma.m64nNk32`` is, warp by warp, the m16 fragment of ``mma.m16n8k32``. A byte holds the code of k in its low
nibble and the code of k + 32 in its high one, so for a 32-bit word w, ``(w << 4) & 0xF0F0F0F0`` is the register of the
first k32 step and ``w & 0xF0F0F0F0`` that of the second, each byte being 16 times its code. With integer group scales
a nibble holds u = q + 8, and ``((w & 0x0F0F0F0F) · m + (128 - 8 m) · 0x01010101) ^ 0x80808080`` is the register of the
bytes q · m. Source of the maps: PTX ISA, "Matrix Fragments for mma.m16n8k32" and "Matrix Fragments for
wgmma.mma_async.m64nNk32"; drawn in docs/mma-layouts.md.
"""

from __future__ import annotations

import torch

from omniw4.int4 import GROUP_SIZE, pack_nibbles, unpack_nibbles
from omniw4.repack.axes import AxisMap, pad, round_up
from omniw4.repack.operands import check_linear, cut, pack_rest, take, unpack_rest
from omniw4.tensors import LinearSpec, QuantizedLinear

OFFSET = (
    0x88  # nibbles of q + 8 in place of two's complement q: a small integer is multiplied in without sign extension
)
BLOCK = 64  # output features a block: four warps of 16 rows

_CODES = AxisMap(
    rows="n_block warp row8 g",
    columns="k_block step k16 t byte",
    fragment="n_block k_block warp g t k16 row8 byte step",
    sizes={"warp": 4, "row8": 2, "g": 8, "step": 2, "k16": 2, "t": 4, "byte": 4},
)
_SCALES = AxisMap(
    rows="n_block warp row8 g",
    columns="k_block",
    fragment="n_block k_block warp g row8",
    sizes={"warp": 4, "row8": 2, "g": 8},
)


def pack_widened(linear: QuantizedLinear, n_tile: int) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order.

    Args:
        linear: what to pack.
        n_tile: multiple of 64 to which N is padded with zeros.

    Returns:
        ``qweight [N'/64, K/64, 4, 32, 16]`` uint8 (warp, lane, bytes of four words), ``w_scales
        [N'/64, K/64, 4, 8, 2]`` float16 or uint8 (warp, g, rows g and g + 8), with integer scales ``row_scales [N']``
        and nibbles of q + 8 instead of q, and what
        :func:`omniw4.repack.operands.pack_rest` carries.

    Raises:
        LayoutError: tensors of the linear that do not fit together.
    """
    check_linear(linear)
    n, groups = round_up(linear.out_features, n_tile), linear.in_features // GROUP_SIZE
    codes = _CODES.forward(unpack_nibbles(pad(linear.qweight, 0, n)))
    scales = _SCALES.forward(pad(linear.w_scales, 0, n))
    packed = {
        "qweight": pack_nibbles(codes).reshape(n // BLOCK, groups, 4, 32, 16),
        "w_scales": scales.reshape(n // BLOCK, groups, 4, 8, 2),
        **pack_rest(linear, n_tile),
    }
    if linear.row_scales is not None:
        packed["qweight"] = packed["qweight"] ^ OFFSET
        packed["row_scales"] = pad(linear.row_scales, 0, n)
    return packed


def unpack_widened(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int, n_tile: int) -> QuantizedLinear:
    """Inverse of :func:`pack_widened`, bit for bit.

    Raises:
        LayoutError: a tensor is missing, has another shape or dtype, or its padding is not zero.
    """
    padded, groups = round_up(n, n_tile), k // GROUP_SIZE
    qweight = take(packed, "qweight", (padded // BLOCK, groups, 4, 32, 16), torch.uint8)
    integer = spec.scale_type == "integer"
    scales = take(packed, "w_scales", (padded // BLOCK, groups, 4, 8, 2), torch.uint8 if integer else torch.float16)
    rows = take(packed, "row_scales", (padded,), torch.float32) if integer else None
    if integer:
        qweight = qweight ^ OFFSET
    canonical = pack_nibbles(_CODES.inverse(unpack_nibbles(qweight), padded, k))
    return QuantizedLinear(
        spec,
        qweight=cut("qweight", canonical, 0, n),
        w_scales=cut("w_scales", _SCALES.inverse(scales, padded, groups), 0, n),
        row_scales=None if rows is None else cut("row_scales", rows, 0, n),
        **unpack_rest(packed, spec, n, k, n_tile),
    )


def unsupported_widened(spec: LinearSpec, layout: str) -> str:
    """Why no kernel of the layout can run such a linear; empty when one can."""
    if spec.act_bits in (4, 8):
        return ""
    return f"{layout} multiplies INT4 or INT8 activations, this linear has {spec.act_bits} bits"
