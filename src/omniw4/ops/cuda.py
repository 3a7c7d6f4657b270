"""The ops on a CUDA device: checked tensors to addresses, the tensor's own device and current stream, one launch.

Importing this module registers the kernels with the ops. Where none is compiled the references run in layout
"canonical"; asking for a family's layout then raises :class:`~omniw4.errors.KernelError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omniw4.ops import extension, gemm_mma_s8, gemm_wgmma_s8
from omniw4.ops.checks import require, require_dtype, require_shape
from omniw4.ops.gemm_lora_up import check_gemm_lora_up, gemm_lora_up, gemm_lora_up_ref
from omniw4.ops.gemm_qknorm_rope import check_gemm_qknorm_rope, gemm_qknorm_rope, gemm_qknorm_rope_ref
from omniw4.ops.inv_rms import check_inv_rms, inv_rms, inv_rms_ref
from omniw4.ops.launch import (
    MAX_RANK,
    NAMES,
    address,
    aligned,
    aligned_rows,
    launch,
    launch_gemm,
    low_rank_operands,
    padded_rank,
)
from omniw4.ops.layouts import (
    CANONICAL,
    FLOAT16,
    INTEGER,
    MMA_S8,
    WGMMA_S8,
    activation_shapes,
    branch_width,
    lora_act_shape,
    register_kernels,
)
from omniw4.ops.pack_lora_act import check_pack_lora_act, pack_lora_act, pack_lora_act_ref
from omniw4.ops.qknorm_rope import check_qknorm_rope, qknorm_rope, qknorm_rope_ref
from omniw4.ops.quantize_lora_down import check_quantize_lora_down, quantize_lora_down, quantize_lora_down_ref

MMA_S4 = "mma_s4"
NATIVE_S4 = {(8, 0), (8, 6), (8, 7), (8, 9)}  # GPUs whose tensor cores multiply INT4
COLUMN_BLOCK = 128
HEAD_DIMS = (64, 128)


@inv_rms.register_kernel("cuda")
def _inv_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    check_inv_rms(x, eps)
    if not extension.usable(x.device):
        return inv_rms_ref(x, eps)
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    out = x.new_empty(x.shape[0], dtype=torch.float32)
    launch(
        "inv_rms", "inv_rms", x, x=x.data_ptr(), out=out.data_ptr(), rows=x.shape[0], cols=x.shape[1],
        row_stride=x.stride(0), eps=eps, dtype=NAMES[x.dtype],
    )  # fmt: skip
    return out


@quantize_lora_down.register_kernel("cuda")
def _quantize_lora_down(
    x: torch.Tensor,
    proj_down: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
    act_bits: int,
    act_clip: float,
    layout: str,
    scale_type: str = FLOAT16,
    eps: float = 0.0,
    weights_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    op = "quantize_lora_down"
    arguments = (x, proj_down, inv_smooth, inv_rms, norm_weight, rotation, act_bits, act_clip, scale_type)
    integer = (scale_type, act_bits) == (INTEGER, 4)
    if layout == CANONICAL and (integer or not extension.usable(x.device)):
        return quantize_lora_down_ref(*arguments, eps)
    check_quantize_lora_down(*arguments, layout)
    tokens, width = x.shape
    shapes = activation_shapes(layout, tokens, width, act_bits, x.dtype, scale_type)
    qact = x.new_empty(shapes.qact, dtype=shapes.qact_dtype)
    a_scales = x.new_empty(shapes.a_scales, dtype=shapes.a_scales_dtype)
    rank, down = branch_width(layout, proj_down), None
    if proj_down is not None and rank > 0:
        down = aligned(proj_down.to(x.dtype)) if layout == WGMMA_S8 else padded_rank(proj_down, x.dtype, op)
    width_of_branch = branch_width(layout, down)
    require(width_of_branch <= MAX_RANK, op, f"the low-rank branch has rank {rank}, the kernels go up to {MAX_RANK}")
    if norm_weight is not None and inv_rms is None and layout != WGMMA_S8:
        inv_rms = _inv_rms(x, eps)
    lora_shape, lora_dtype = lora_act_shape(layout, tokens, width_of_branch, x.dtype)
    lora_act = x.new_empty(lora_shape, dtype=lora_dtype)
    x = aligned_rows(x)
    weight = None if norm_weight is None else aligned(norm_weight)
    smooth = None if inv_smooth is None else aligned(inv_smooth)
    rms = None if inv_rms is None else inv_rms.contiguous()
    launch(
        op, op, x, x=x.data_ptr(), inv_rms=address(rms), norm_weight=address(weight), inv_smooth=address(smooth),
        proj_down=address(down), qact=qact.data_ptr(), a_scales=a_scales.data_ptr(), lora_act=lora_act.data_ptr(),
        rows=tokens, cols=width, row_stride=x.stride(0) if tokens > 1 else width, rank=width_of_branch,
        act_bits=act_bits, clip=act_clip, rotate=rotation == "hadamard64", layout=layout, dtype=NAMES[x.dtype],
        integer_scales=integer, eps=eps, weights_ready=weights_ready,
    )  # fmt: skip
    whole = width_of_branch == rank or layout == WGMMA_S8
    lora_act = lora_act if whole else lora_act[:, :rank].contiguous()
    return qact, a_scales, lora_act, x.new_empty(shapes.token_scales, dtype=torch.float32)


@pack_lora_act.register_kernel("cuda")
def _pack_lora_act(lora_act: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    check_pack_lora_act(lora_act, dtype)
    if not extension.usable(lora_act.device):
        return pack_lora_act_ref(lora_act, dtype)
    tokens, rank = lora_act.shape
    lora_act = lora_act.contiguous()
    packed = lora_act.new_empty(((tokens + 15) // 16, (rank + 15) // 16, 32, 8), dtype=dtype)
    launch(
        "pack_lora_act", "pack_lora_act", lora_act, lora_act=lora_act.data_ptr(), packed=packed.data_ptr(),
        rows=tokens, rank=rank, dtype=NAMES[dtype],
    )  # fmt: skip
    return packed


@qknorm_rope.register_kernel("cuda")
def _qknorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    if head_dim not in HEAD_DIMS or not extension.usable(qkv.device):
        return qknorm_rope_ref(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, head_dim, eps)
    check_qknorm_rope(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, head_dim, eps)
    in_rows = aligned_rows(qkv)
    heads = _heads(q_weight, k_weight, cos, sin, positions)
    launch(
        "qknorm_rope", "qknorm_rope", qkv, qkv=in_rows.data_ptr(), rows=qkv.shape[0], row_stride=_row_stride(in_rows),
        q_heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim, eps=eps, dtype=NAMES[qkv.dtype],
        table_rows=cos.shape[0], **{name: address(tensor) for name, tensor in heads.items()},
    )  # fmt: skip
    if in_rows is not qkv:
        qkv.copy_(in_rows)
    return None


def _row_stride(x: torch.Tensor) -> int:
    """torch gives a single row any stride; the kernels want one that fits."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _heads(
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """The tensors of the norm and the rotation by their names in the module; held until the launch."""
    return {
        "q_weight": None if q_weight is None else aligned(q_weight),
        "k_weight": None if k_weight is None else aligned(k_weight),
        "cos": aligned(cos),
        "sin": aligned(sin),
        "positions": positions.contiguous(),
    }


def _gemm(
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
    layout: str,
    tile: int = 0,
    **heads: Any,
) -> torch.Tensor:
    """One launch of the GEMM of family mma_s4, with the checks of its operands."""
    known = ", ".join(map(repr, (MMA_S4, MMA_S8, WGMMA_S8)))
    require(layout == MMA_S4, op, f"no GEMM kernel reads layout {layout!r}, found {known} compiled")
    require(qweight.dim() == 5, op, f"qweight has shape {list(qweight.shape)}, wanted [N'/128, K/64, 8, 32, 16]")
    blocks, groups = -(-out_features // COLUMN_BLOCK), qweight.shape[1]
    require_shape(op, "qweight", qweight, (blocks, groups, 8, 32, 16))
    require_shape(op, "w_scales", w_scales, (blocks, groups, COLUMN_BLOCK))
    shapes = activation_shapes(layout, tokens, groups * 64, act_bits, dtype)
    require_dtype(op, "qact", qact, shapes.qact_dtype)
    require_shape(op, "qact", qact, shapes.qact)
    require_shape(op, "a_scales", a_scales, shapes.a_scales)
    act, up = low_rank_operands(op, lora_act, proj_up, dtype)
    return launch_gemm(
        op, qact, a_scales, qweight, w_scales, act, up, bias, residual, tokens, out_features, groups, epilogue, dtype,
        rank=0 if up is None else up.shape[1], lora_act_packed=act is not None and act.dim() == 4, tile=tile, **heads,
    )  # fmt: skip


@gemm_lora_up.register_kernel("cuda")
def _gemm_lora_up(
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
    layout: str,
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
    weights_ready: bool = False,
) -> torch.Tensor:
    linear = (qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, residual, tokens, out_features, act_bits)
    if layout == CANONICAL:
        return gemm_lora_up_ref(*linear, epilogue, dtype, row_scales, token_scales, segment_ends=segment_ends)
    check_gemm_lora_up(*linear, epilogue, dtype, layout, row_scales, None, segment_ends)
    if layout == WGMMA_S8:
        return gemm_wgmma_s8.gemm(
            "gemm_lora_up", *linear, epilogue, dtype, row_scales=row_scales, segment_ends=segment_ends,
            weights_ready=weights_ready,
        )  # fmt: skip
    require(segment_ends is None, "gemm_lora_up", f"no GEMM kernel of layout {layout!r} takes segments")
    if layout == MMA_S8:
        return gemm_mma_s8.gemm("gemm_lora_up", *linear, epilogue, dtype, row_scales=row_scales)
    _refuse_integer_scales("gemm_lora_up", layout, row_scales)
    return _gemm("gemm_lora_up", *linear, epilogue, dtype, layout)


@gemm_qknorm_rope.register_kernel("cuda")
def _gemm_qknorm_rope(
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor,
    lora_act: torch.Tensor | None,
    proj_up: torch.Tensor | None,
    bias: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    tokens: int,
    act_bits: int,
    dtype: torch.dtype,
    layout: str,
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
    weights_ready: bool = False,
) -> torch.Tensor:
    op = "gemm_qknorm_rope"
    linear = (qact, a_scales, qweight, w_scales, lora_act, proj_up, bias)
    rotary = (q_weight, k_weight, cos, sin, positions)
    if layout == CANONICAL:
        return gemm_qknorm_rope_ref(
            *linear, *rotary, num_heads, num_kv_heads, head_dim, eps, tokens, act_bits, dtype, row_scales, token_scales,
            segment_ends,
        )  # fmt: skip
    check_gemm_qknorm_rope(
        *linear, *rotary, num_heads, num_kv_heads, head_dim, eps, tokens, act_bits, dtype, layout, row_scales,
        None, segment_ends,
    )  # fmt: skip
    out_features = (num_heads + 2 * num_kv_heads) * head_dim
    if layout == WGMMA_S8 and (row_scales is None or head_dim not in HEAD_DIMS):  # two launches, the same bits
        y = gemm_wgmma_s8.gemm(
            op, *linear, None, tokens, out_features, act_bits, "plain", dtype, row_scales=row_scales,
            segment_ends=segment_ends, weights_ready=weights_ready,
        )  # fmt: skip
        _qknorm_rope(y, *rotary, num_heads, num_kv_heads, head_dim, eps)
        return y
    require(head_dim in HEAD_DIMS, op, f"head_dim is {head_dim}, the kernels have {HEAD_DIMS}")
    tensors = _heads(*rotary)
    heads: dict[str, Any] = {name: address(tensor) for name, tensor in tensors.items()}
    heads |= {"q_heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim, "eps": eps}
    heads["table_rows"] = cos.shape[0]
    fused = (*linear, None, tokens, out_features, act_bits, "qknorm_rope", dtype)
    if layout == WGMMA_S8:
        return gemm_wgmma_s8.gemm(
            op, *fused, row_scales=row_scales, segment_ends=segment_ends, weights_ready=weights_ready, **heads
        )
    require(segment_ends is None, op, f"no GEMM kernel of layout {layout!r} takes segments")
    if layout == MMA_S8:
        return gemm_mma_s8.gemm(op, *fused, row_scales=row_scales, **heads)
    _refuse_integer_scales(op, layout, row_scales)
    return _gemm(op, *fused, layout, **heads)


def _refuse_integer_scales(op: str, layout: str, row_scales: torch.Tensor | None) -> None:
    what = f"the GEMM of layout {layout!r} takes no integer group scales"
    require(row_scales is None, op, what, hint=f"layout {MMA_S8!r} runs on the same GPUs and takes them")


def _runs_mma_s4(device: torch.device, act_bits: int) -> bool:
    """Where it is native: elsewhere the compiler emulates its instruction, and mma_s8 is faster."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if act_bits != 4 or torch.cuda.get_device_capability(device) not in NATIVE_S4:
        return False
    return extension.usable(device)


register_kernels(WGMMA_S8, gemm_wgmma_s8.runs, (FLOAT16, INTEGER))
register_kernels(MMA_S4, _runs_mma_s4)
register_kernels(MMA_S8, gemm_mma_s8.runs, (FLOAT16, INTEGER))
