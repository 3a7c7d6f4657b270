"""``gemm_qknorm_rope``: the fused q/k/v linear with per-head norm and rotary embedding in its epilogue.

Contract
    ``gemm_lora_up(..., epilogue="plain")`` rounded to dtype, then ``qknorm_rope`` in place: the kernel gives the bits
    of these two ops, one after the other. Arguments are theirs; out_features is ``(Hq + 2·Hkv)·D``.

    Errors: OpError for wrong shapes, dtypes, devices or options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniw4.ops.checks import require, require_dtype, require_same_device, require_shape
from omniw4.ops.gemm_lora_up import check_gemm_lora_up, gemm_lora_up_ref
from omniw4.ops.layouts import CANONICAL, require_canonical
from omniw4.ops.qknorm_rope import qknorm_rope_ref

_OP = "gemm_qknorm_rope"


def check_gemm_qknorm_rope(
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
    layout: str = CANONICAL,
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
) -> None:
    require(num_heads > 0 and num_kv_heads > 0, _OP, f"found {num_heads} query and {num_kv_heads} key heads")
    require(num_heads % num_kv_heads == 0, _OP, f"{num_kv_heads} key heads do not divide {num_heads} query heads")
    require(head_dim > 0 and head_dim % 2 == 0, _OP, f"head_dim is {head_dim}, wanted an even number")
    require(eps >= 0, _OP, f"eps is {eps}, wanted a number that is not negative")
    out_features = (num_heads + 2 * num_kv_heads) * head_dim
    check_gemm_lora_up(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, None, tokens, out_features, act_bits, "plain",
        dtype, layout, row_scales, token_scales, segment_ends,
    )  # fmt: skip
    require_same_device(_OP, qact, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, positions=positions)
    require_dtype(_OP, "positions", positions, torch.int64)
    require_shape(_OP, "positions", positions, (tokens,))
    for name, table in (("cos", cos), ("sin", sin)):
        require_dtype(_OP, name, table, torch.float32)
        require_shape(_OP, name, table, (cos.shape[0], head_dim // 2))
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            require_dtype(_OP, name, weight, dtype)
            require_shape(_OP, name, weight, (head_dim,))


def gemm_qknorm_rope_ref(
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
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """The contract in plain torch, layout "canonical"."""
    check_gemm_qknorm_rope(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, q_weight, k_weight, cos, sin, positions,
        num_heads, num_kv_heads, head_dim, eps, tokens, act_bits, dtype, CANONICAL, row_scales, token_scales,
        segment_ends,
    )  # fmt: skip
    out_features = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = gemm_lora_up_ref(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, None, tokens, out_features, act_bits, "plain",
        dtype, row_scales, token_scales, segment_ends=segment_ends,
    )  # fmt: skip
    qknorm_rope_ref(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, head_dim, eps)
    return qkv


@torch.library.custom_op("omniw4::gemm_qknorm_rope", mutates_args=())
def gemm_qknorm_rope(
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
    require_canonical(layout, _OP)
    return gemm_qknorm_rope_ref(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, q_weight, k_weight, cos, sin, positions,
        num_heads, num_kv_heads, head_dim, eps, tokens, act_bits, dtype, row_scales, token_scales,
        segment_ends,
    )  # fmt: skip


@gemm_qknorm_rope.register_fake
def _(
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
    return qact.new_empty((tokens, (num_heads + 2 * num_kv_heads) * head_dim), dtype=dtype)
