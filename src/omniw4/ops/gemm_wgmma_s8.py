"""The GEMM of family wgmma_s8: checks of its operands, which docs/mma-layouts.md draws, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omniw4.ops import extension
from omniw4.ops.checks import require, require_dtype, require_shape
from omniw4.ops.launch import MAX_RANK, RANK_TILE, address, aligned, launch_gemm
from omniw4.ops.layouts import FLOAT16, INTEGER, WGMMA_S8, activation_shapes, lora_act_shape

COLUMN_BLOCK = 128
BLOCK_BYTES = 2176  # codes and FP16 scales of 64 output features and a group
INTEGER_BLOCK_BYTES = 2112  # codes, and scales of a byte each
SEGMENT_STEP = 64


def gemm(
    op: str,
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor,
    lora_act: torch.Tensor | None,
    proj_up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tokens: int,
    out_features: int,
    act_bits: int,
    epilogue: str,
    dtype: torch.dtype,
    tile: int = 0,
    row_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
    weights_ready: bool = False,
    **heads: Any,
) -> torch.Tensor:
    """One launch.

    Args:
        op: whose name errors bear.
        w_scales: empty; the scales are in qweight.
        tile: 0 for the tile that suits the shape, else its number in tuning_sm90a.h, or with row_scales in
            integer_tile_sm90a.h; every one gives the same bits. Epilogue "qknorm_rope" needs one of whole heads.
        row_scales: ``[N']``; with them the weights' group scales are integers.
        segment_ends, weights_ready: see :mod:`omniw4.ops.gemm_lora_up`.
        heads: with epilogue "qknorm_rope", which needs row_scales, its tensors' addresses and sizes.
    """
    block = BLOCK_BYTES if row_scales is None else INTEGER_BLOCK_BYTES
    require(qweight.dim() == 3, op, f"qweight has shape {list(qweight.shape)}, wanted [N'/64, K/64, {block}]")
    padded, groups = -(-out_features // COLUMN_BLOCK) * COLUMN_BLOCK, qweight.shape[1]
    require_shape(op, "qweight", qweight, (padded // 64, groups, block))
    require_shape(op, "w_scales", w_scales, (padded // 64, groups, 0))
    if row_scales is not None:
        require_shape(op, "row_scales", row_scales, (padded,))
    ends = list(segment_ends or ())
    require(
        not ends or (row_scales is not None and not any(end % SEGMENT_STEP for end in ends)),
        op, f"segment_ends are {ends}, wanted multiples of {SEGMENT_STEP}, with integer scales",
    )  # fmt: skip
    scale_type = FLOAT16 if row_scales is None else INTEGER
    shapes = activation_shapes(WGMMA_S8, tokens, groups * 64, act_bits, dtype, scale_type)
    require_dtype(op, "qact", qact, shapes.qact_dtype)
    require_shape(op, "qact", qact, shapes.qact)
    require_shape(op, "a_scales", a_scales, shapes.a_scales)
    rank = 0
    if lora_act is not None and proj_up is not None:
        rank = proj_up.shape[0] * RANK_TILE
        require(rank <= MAX_RANK, op, f"the low-rank branch has rank {rank}, the kernels go up to {MAX_RANK}")
        require_shape(op, "proj_up", proj_up, (rank // RANK_TILE, padded // 16, 32, 8))
        wanted, lora_dtype = lora_act_shape(WGMMA_S8, tokens, rank * (1 + len(ends)), dtype)
        require_dtype(op, "lora_act", lora_act, lora_dtype)
        require_shape(op, "lora_act", lora_act, wanted)
    act = None if lora_act is None or rank == 0 else aligned(lora_act)
    up = None if proj_up is None or rank == 0 else aligned(proj_up.to(dtype))
    rows = None if row_scales is None else aligned(row_scales)
    return launch_gemm(
        op, qact, a_scales, qweight, None, act, up, bias, residual, tokens, out_features, groups, epilogue, dtype,
        rank=rank, lora_act_packed=True, tile=tile, layout=WGMMA_S8, act_bits=act_bits, row_scales=address(rows),
        segment_ends=ends, weights_ready=weights_ready, **heads,
    )  # fmt: skip


def runs(device: torch.device, act_bits: int) -> bool:
    """Whether the family works on a device: sm_90 alone, and only with kernels compiled for it."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if act_bits not in (4, 8) or "90a" not in extension.compiled_archs():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and extension.usable(device)
