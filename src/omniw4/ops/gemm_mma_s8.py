"""The GEMM of family mma_s8: checks of its operands, which docs/mma-layouts.md draws, and its launch."""

from __future__ import annotations

from typing import Any

import torch

from omniw4.ops import extension
from omniw4.ops.checks import require, require_dtype, require_shape
from omniw4.ops.launch import address, aligned, launch_gemm, low_rank_operands
from omniw4.ops.layouts import FLOAT16, INTEGER, MMA_S8, activation_shapes

FEATURE_BLOCK = 64


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
    **heads: Any,
) -> torch.Tensor:
    """One launch.

    Args:
        op: whose name errors bear.
        tile: 0 for the tile that suits the shape, else the tokens of a block, 16, 64 or 128; all give the same bits.
        row_scales: ``[N']``; with them the weights' group scales are integers.
        heads: with epilogue "qknorm_rope", its arguments by their names in the module.
    """
    wanted = "[N'/64, K/64, 4, 32, 16]"
    require(qweight.dim() == 5, op, f"qweight has shape {list(qweight.shape)}, wanted {wanted}")
    blocks, groups = -(-out_features // FEATURE_BLOCK), qweight.shape[1]
    require_shape(op, "qweight", qweight, (blocks, groups, 4, 32, 16))
    require_shape(op, "w_scales", w_scales, (blocks, groups, 4, 8, 2))
    if row_scales is not None:
        require_shape(op, "row_scales", row_scales, (blocks * FEATURE_BLOCK,))
    scale_type = FLOAT16 if row_scales is None else INTEGER
    shapes = activation_shapes(MMA_S8, tokens, groups * 64, act_bits, dtype, scale_type)
    require_dtype(op, "qact", qact, shapes.qact_dtype)
    require_shape(op, "qact", qact, shapes.qact)
    require_shape(op, "a_scales", a_scales, shapes.a_scales)
    act, up = low_rank_operands(op, lora_act, proj_up, dtype)
    rows = None if row_scales is None else aligned(row_scales)
    return launch_gemm(
        op, qact, a_scales, qweight, w_scales, act, up, bias, residual, tokens, out_features, groups, epilogue, dtype,
        rank=0 if up is None else up.shape[1], lora_act_packed=act is not None and act.dim() == 4, tile=tile,
        layout=MMA_S8, act_bits=act_bits, row_scales=address(rows), **heads,
    )  # fmt: skip


def runs(device: torch.device, act_bits: int) -> bool:
    """Whether the family works on a device: every GPU that any compiled kernel runs on."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return act_bits in (4, 8) and extension.usable(device)
