"""Layout ``mma_s4``: fragments of ``mma.sync.m16n8k64`` s4, tokens as operand A and weights as operand B.

For sm_80, sm_86 and sm_89, whose tensor cores multiply INT4 natively. One k64 step of the instruction is one
quantization group, and a register holds eight nibbles of consecutive k: four consecutive bytes of the canonical
tensors, so the maps move whole bytes. Source of the maps: PTX ISA, "Matrix Fragments for mma.m16n8k64" and, for the
low-rank activations, "Matrix Fragments for mma.m16n8k16 with floating point type"; drawn in docs/mma-layouts.md.
"""

from __future__ import annotations

import torch

from omniw4.errors import LayoutError
from omniw4.int4 import GROUP_SIZE
from omniw4.repack.axes import AxisMap, pad, round_up
from omniw4.repack.operands import (
    RANK_TILE,
    check_dtype,
    check_linear,
    check_shape,
    cut,
    pack_rest,
    take,
    unpack_rest,
)
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUT = "mma_s4"
VERSION = 1
N_TILE = 128
M_TILE = 16

_NO_INTEGER_SCALES = "mma_s4 holds no integer group scales"
_WEIGHTS = AxisMap(
    rows="n_block n16 n8 g",
    columns="k_block reg t byte",
    fragment="n_block k_block n16 g t n8 reg byte",
    sizes={"n16": 8, "n8": 2, "g": 8, "reg": 2, "t": 4, "byte": 4},
)
_ACTIVATIONS = AxisMap(
    rows="m_block row8 g",
    columns="k_block k32 t byte",
    fragment="m_block k_block g t k32 row8 byte",
    sizes={"row8": 2, "g": 8, "k32": 2, "t": 4, "byte": 4},
)
_LORA_ACT = AxisMap(
    rows="m_block row8 g",
    columns="r_block r8 t i",
    fragment="m_block r_block g t r8 row8 i",
    sizes={"row8": 2, "g": 8, "r8": 2, "t": 4, "i": 2},
)


def unsupported(spec: LinearSpec) -> str:
    """Why no kernel of this layout can run such a linear; empty when one can."""
    if spec.act_bits != 4:
        return f"mma_s4 multiplies INT4 activations, this linear has {spec.act_bits} bits"
    return _NO_INTEGER_SCALES if spec.scale_type == "integer" else ""


def pack(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order.

    Returns:
        ``qweight [N'/128, K/64, 8, 32, 16]`` uint8 (n16 tile, lane, bytes ``{b0, b1}`` of its two n8 tiles),
        ``w_scales [N'/128, K/64, 128]`` float16 in natural order of n, and what
        :func:`omniw4.repack.operands.pack_rest` carries. N' is N rounded up to 128; padding is zero.

    Raises:
        LayoutError: tensors of the linear that do not fit together, or integer group scales.
    """
    check_linear(linear)
    if linear.spec.scale_type == "integer":
        raise LayoutError(_NO_INTEGER_SCALES, hint="layout mma_s8 holds them, and runs on the same GPUs")
    n, groups = round_up(linear.out_features, N_TILE), linear.in_features // GROUP_SIZE
    scales = pad(linear.w_scales, 0, n).reshape(n // N_TILE, N_TILE, groups)
    return {
        "qweight": _WEIGHTS.forward(pad(linear.qweight, 0, n)).reshape(n // N_TILE, groups, 8, 32, 16),
        "w_scales": scales.transpose(1, 2).contiguous(),
        **pack_rest(linear, N_TILE),
    }


def unpack(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear:
    """Inverse of :func:`pack`, bit for bit.

    Args:
        packed: what :func:`pack` returned.
        spec: of the linear; its rank says how much of the low-rank branch is padding.
        n: out_features.
        k: in_features.

    Raises:
        LayoutError: a tensor is missing, has another shape or dtype, or its padding is not zero.
    """
    blocks, groups = round_up(n, N_TILE) // N_TILE, k // GROUP_SIZE
    qweight = take(packed, "qweight", (blocks, groups, 8, 32, 16), torch.uint8)
    scales = take(packed, "w_scales", (blocks, groups, N_TILE), torch.float16)
    return QuantizedLinear(
        spec,
        qweight=cut("qweight", _WEIGHTS.inverse(qweight, blocks * N_TILE, k // 2), 0, n),
        w_scales=cut("w_scales", scales.transpose(1, 2).reshape(blocks * N_TILE, groups), 0, n),
        **unpack_rest(packed, spec, n, k, N_TILE),
    )


def pack_activations(qact: torch.Tensor, a_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Canonical INT4 activations to fragment order: the reference of what the quantizer kernel stores.

    Args:
        qact: ``[M, K/2]`` uint8.
        a_scales: ``[M, K/64]`` float16.

    Returns:
        ``[M'/16, K/64, 32, 16]`` uint8 (lane, bytes of registers a0..a3) and ``[K/64, M']`` float16, M' being M
        rounded up to 16; padding is zero.

    Raises:
        LayoutError: shapes or dtypes that do not fit together.
    """
    if qact.dim() != 2 or qact.shape[1] % (GROUP_SIZE // 2):
        raise LayoutError(f"qact has shape {list(qact.shape)}, wanted [M, K/2] with K a multiple of {GROUP_SIZE}")
    tokens, groups = qact.shape[0], qact.shape[1] * 2 // GROUP_SIZE
    check_shape("a_scales", a_scales, (tokens, groups))
    check_dtype("qact", qact, torch.uint8)
    check_dtype("a_scales", a_scales, torch.float16)
    m = round_up(tokens, M_TILE)
    fragments = _ACTIVATIONS.forward(pad(qact, 0, m)).reshape(m // M_TILE, groups, 32, 16)
    return fragments, pad(a_scales, 0, m).T.contiguous()


def unpack_activations(fragments: torch.Tensor, a_scales: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`pack_activations` for ``m`` tokens.

    Rows past ``m`` are cut unread: the kernel that fills this layout may leave anything there.
    """
    padded = round_up(m, M_TILE)
    groups = a_scales.shape[0]
    check_shape("qact", fragments, (padded // M_TILE, groups, 32, 16))
    check_shape("a_scales", a_scales, (groups, padded))
    qact = _ACTIVATIONS.inverse(fragments, padded, groups * GROUP_SIZE // 2)
    return qact[:m].contiguous(), a_scales.T[:m].contiguous()


def pack_lora_act(lora_act: torch.Tensor) -> torch.Tensor:
    """Low-rank activations to operand A of ``mma.m16n8k16`` f16 or bf16.

    Args:
        lora_act: ``[M, R]`` of a 16-bit dtype.

    Returns:
        ``[M'/16, R'/16, 32, 8]`` of the same dtype (lane, two elements of each of a0..a3), M' and R' rounded up
        to 16; padding is zero.

    Raises:
        LayoutError: not a matrix of 16-bit elements.
    """
    if lora_act.dim() != 2 or lora_act.element_size() != 2:
        raise LayoutError(f"lora_act is {lora_act.dtype} {list(lora_act.shape)}, wanted [M, R] float16 or bfloat16")
    m, rank = round_up(lora_act.shape[0], M_TILE), round_up(lora_act.shape[1], RANK_TILE)
    padded = pad(pad(lora_act, 0, m), 1, rank)
    return _LORA_ACT.forward(padded).reshape(m // M_TILE, rank // RANK_TILE, 32, 8)


def unpack_lora_act(fragments: torch.Tensor, m: int, rank: int) -> torch.Tensor:
    """Inverse of :func:`pack_lora_act`: ``[m, rank]``; what lies past them is cut unread."""
    padded_m, padded_rank = round_up(m, M_TILE), round_up(rank, RANK_TILE)
    check_shape("lora_act", fragments, (padded_m // M_TILE, padded_rank // RANK_TILE, 32, 8))
    return _LORA_ACT.inverse(fragments, padded_m, padded_rank)[:m, :rank].contiguous()
