"""``attention_varlen`` on a CUDA device: the kernel for sm_90, or the reference.

Importing this module registers both forms of the op.
"""

from __future__ import annotations

import torch

from omniw4.ops import extension
from omniw4.ops.attention_varlen import (
    HEAD_DIMS,
    attention_varlen,
    attention_varlen_out,
    attention_varlen_ref,
    check_attention_varlen,
)
from omniw4.ops.launch import NAMES, aligned_rows, launch

ARCH = "90a"


def attention_kernel_runs(device: torch.device, head_dim: int) -> bool:
    """Whether the compiled kernel, and not the reference, serves heads of this size on a device."""
    if device.type != "cuda" or head_dim not in HEAD_DIMS or ARCH not in extension.compiled_archs():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@attention_varlen.register_kernel("cuda")
def _attention_varlen(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    scale: float,
    ready: bool = False,
) -> torch.Tensor:
    check_attention_varlen(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, scale)
    out = qkv.new_empty(qkv.shape[0], q_heads * head_dim)
    _attention_varlen_out(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, causal, scale, out, ready)
    return out


@attention_varlen_out.register_kernel("cuda")
def _attention_varlen_out(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    ready: bool = False,
) -> None:
    if not attention_kernel_runs(qkv.device, head_dim):
        attention_varlen_ref(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, causal, scale, out)
        return
    check_attention_varlen(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, scale, out)
    rows = qkv.shape[0]
    source, boundaries = aligned_rows(qkv), cu_seqlens.contiguous()
    target = aligned_rows(out)
    launch(
        "attention_varlen", "attention_varlen", qkv, qkv=source.data_ptr(), cu_seqlens=boundaries.data_ptr(),
        out=target.data_ptr(), rows=rows, row_stride=source.stride(0) if rows > 1 else source.shape[1],
        out_stride=target.stride(0) if rows > 1 else target.shape[1], sequences=boundaries.shape[0] - 1,
        max_seqlen=min(max_seqlen, rows), q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal,
        scale=scale, dtype=NAMES[qkv.dtype], boundaries_ready=ready,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
