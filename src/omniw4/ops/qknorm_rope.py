"""``qknorm_rope``: per-head RMSNorm of queries and keys, then rotary position embedding, in place.

Contract
    ``qkv`` holds, in each row, Hq query heads, Hkv key heads and Hkv value heads of D each. For every query and key
    head ``h`` of row m, with ``round`` to the dtype of qkv and all else in FP32::

        n       = round(round(h / sqrt(mean(h²) + eps)) · weight)      # skipped when the weight is None
        c, s    = cos[positions[m]], sin[positions[m]]                 # D/2 each
        out[j]        = round(n[j] · c[j] - n[j + D/2] · s[j])         # j < D/2
        out[j + D/2]  = round(n[j + D/2] · c[j] + n[j] · s[j])

    Values are not touched.

    =============  ==========================================================================================
    qkv            [M, (Hq + 2·Hkv)·D] float16 or bfloat16 (float32 on a CPU), changed in place, rows contiguous
    q_weight       [D] of the dtype of qkv, or None
    k_weight       the same
    cos, sin       [P, D/2] float32, row p for position p (:func:`rope_tables`)
    positions      [M] int64
    num_heads, num_kv_heads, head_dim (even; the kernels have 64 and 128), eps
    =============  ==========================================================================================

    Bounded: by twice the error of plain torch in the dtype against FP64. A row's bits never depend on other rows. A
    position outside the table cannot be reported without waiting for the device: its queries and keys become NaN, and
    nothing outside the table is read.

    Errors: OpError for wrong shapes, dtypes, devices or options.

Source: RoFormer, arXiv 2104.09864, in the half-split form of transformers' ``rotate_half``; Qwen3's q_norm, k_norm.
"""

from __future__ import annotations

import torch

from omniw4.ops.checks import require, require_activations, require_dtype, require_same_device, require_shape

_OP = "qknorm_rope"


def rope_tables(positions: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each ``[positions, head_dim/2]`` float32, of ``p · theta^(-2j/head_dim)``, computed in FP64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-exponents
    return angles.cos().float(), angles.sin().float()


def check_qknorm_rope(
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
    require_activations(_OP, "qkv", qkv)
    require(qkv.stride(1) == 1 or qkv.shape[0] == 0, _OP, f"qkv has strides {qkv.stride()}, wanted contiguous rows")
    require(head_dim > 0 and head_dim % 2 == 0, _OP, f"head_dim is {head_dim}, wanted an even number")
    require(num_heads > 0 and num_kv_heads > 0, _OP, f"found {num_heads} query and {num_kv_heads} key heads")
    require(num_heads % num_kv_heads == 0, _OP, f"{num_kv_heads} key heads do not divide {num_heads} query heads")
    require(eps >= 0, _OP, f"eps is {eps}, wanted a number that is not negative")
    require_same_device(_OP, qkv, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, positions=positions)
    require_shape(_OP, "qkv", qkv, (qkv.shape[0], (num_heads + 2 * num_kv_heads) * head_dim))
    require_dtype(_OP, "positions", positions, torch.int64)
    require_shape(_OP, "positions", positions, (qkv.shape[0],))
    for name, table in (("cos", cos), ("sin", sin)):
        require_dtype(_OP, name, table, torch.float32)
        require_shape(_OP, name, table, (cos.shape[0], head_dim // 2))
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            require_dtype(_OP, name, weight, qkv.dtype)
            require_shape(_OP, name, weight, (head_dim,))


def qknorm_rope_ref(
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
    """The contract in plain torch."""
    check_qknorm_rope(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, head_dim, eps)
    inside = (positions >= 0) & (positions < cos.shape[0])
    rows = torch.where(inside, positions, 0)
    nan = torch.full((), float("nan"), device=qkv.device)
    c, s = (torch.where(inside[:, None], table[rows], nan)[:, None] for table in (cos, sin))  # [M, 1, D/2]
    first = 0
    for heads, weight in ((num_heads, q_weight), (num_kv_heads, k_weight)):
        span = qkv[:, first : first + heads * head_dim]
        first += heads * head_dim
        h = span.reshape(-1, heads, head_dim).float()
        if weight is not None:
            h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(qkv.dtype).float()
            h = (h * weight.float()).to(qkv.dtype).float()
        low, high = h.chunk(2, dim=-1)
        rotated = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
        span.copy_(rotated.reshape(span.shape))


@torch.library.custom_op("omniw4::qknorm_rope", mutates_args=("qkv",))
def qknorm_rope(
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
    qknorm_rope_ref(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, head_dim, eps)


@qknorm_rope.register_fake
def _(
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
    return None
