"""``attention_varlen``: attention over packed sequences of different lengths, read from the fused qkv rows.

Contract
    ``qkv`` holds, in each row, Hq query heads, Hkv key heads and Hkv value heads of D each; rows ``cu_seqlens[b]`` to
    ``cu_seqlens[b + 1]`` are sequence b. For every sequence and query head h, with key head ``g = h // (Hq / Hkv)``::

        out[i, h] = round(sum_j softmax_j(scale · q[i, h] · k[j, g]) · v[j, g])    # j in the sequence; causal: j <= i

    with the softmax in FP32 and ``round`` to the dtype of qkv. Rows that belong to no sequence are 0. Two forms:
    :func:`attention_varlen` returns a new tensor, :func:`attention_varlen_out` writes into a given one.

    =============  ==========================================================================================
    qkv            [P, (Hq + 2·Hkv)·D] float16 or bfloat16 (float32 on a CPU), rows contiguous, any distance apart
    cu_seqlens     [B + 1] int32 on the device of qkv, ascending, within 0..P; equal neighbours are an empty sequence
    max_seqlen     no sequence is longer. It sizes the launch; the result does not depend on it
    q_heads, kv_heads, head_dim (the kernel has 64 and 128), causal, scale (above 0)
    ready          the kernel right before in the stream does not write cu_seqlens: it is read while that one ends
    out            [P, Hq·D] of the dtype of qkv
    =============  ==========================================================================================

    Bounded: by twice the error of torch's ``scaled_dot_product_attention`` in the dtype against FP64. A sequence's bits
    depend on that sequence alone: not on its place in the pack, on its neighbours or on what lies in other rows, NaN
    included. Deterministic.

    On a GPU ``cu_seqlens`` is read by the kernel and may change between replays of a graph. It cannot be checked
    without waiting for the device, so boundaries that make no sense give numbers without meaning, but nothing outside
    the tensors is touched. The kernel is for sm_90; elsewhere the reference runs, which reads ``cu_seqlens`` on the
    host and cannot be captured: :func:`attention_kernel_runs` says which it will be.

    Errors: OpError for wrong shapes, dtypes, devices or options, on a CPU also for boundaries.

Source: FlashAttention-3, arXiv 2407.08608, for the kernel.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from omniw4.ops.checks import require, require_activations, require_dtype, require_same_device, require_shape

_OP = "attention_varlen"
HEAD_DIMS = (64, 128)
_QUERY_CHUNK = 512  # rows of scores that the reference holds at a time


def check_attention_varlen(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> None:
    """Everything but the boundaries themselves."""
    require_activations(_OP, "qkv", qkv)
    require(qkv.stride(1) == 1 or qkv.shape[0] == 0, _OP, f"qkv has strides {qkv.stride()}, wanted contiguous rows")
    require(head_dim > 0, _OP, f"head_dim is {head_dim}, wanted a positive number")
    require(q_heads > 0 and kv_heads > 0, _OP, f"found {q_heads} query and {kv_heads} key heads")
    require(q_heads % kv_heads == 0, _OP, f"{kv_heads} key heads do not divide {q_heads} query heads")
    require(0 < scale < math.inf, _OP, f"scale is {scale}, wanted a positive number")
    require(max_seqlen >= 0, _OP, f"max_seqlen is {max_seqlen}, wanted a number that is not negative")
    require_shape(_OP, "qkv", qkv, (qkv.shape[0], (q_heads + 2 * kv_heads) * head_dim))
    require_same_device(_OP, qkv, cu_seqlens=cu_seqlens, out=out)
    require_dtype(_OP, "cu_seqlens", cu_seqlens, torch.int32)
    boundaries = f"cu_seqlens has shape {list(cu_seqlens.shape)}, wanted [sequences + 1]"
    require(cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0, _OP, boundaries)
    if out is not None:
        require_dtype(_OP, "out", out, qkv.dtype)
        require_shape(_OP, "out", out, (qkv.shape[0], q_heads * head_dim))
        require(out.stride(1) == 1 or out.shape[0] == 0, _OP, f"out has strides {out.stride()}, wanted contiguous rows")


def attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, compute: torch.dtype
) -> torch.Tensor:
    """One sequence and one key head in plain torch: q ``[group, n, D]``, k and v ``[n, D]``, to ``[group, n, D]`` of
    dtype ``compute``."""
    length = k.shape[0]
    k, v = k.to(compute), v.to(compute)
    chunks = []
    for start in range(0, length, _QUERY_CHUNK):
        rows = q[:, start : start + _QUERY_CHUNK].to(compute)
        scores = rows @ k.T * scale  # [group, rows, n]
        if causal:
            row = torch.arange(start, start + rows.shape[1], device=q.device)
            later = torch.arange(length, device=q.device) > row[:, None]
            scores = scores.masked_fill(later, -math.inf)
        chunks.append(scores.softmax(-1) @ v)
    return torch.cat(chunks, 1)


def attention_varlen_ref(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    scale: float,
    out: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The contract in plain torch, one sequence and key head at a time, all but the result in dtype ``compute``."""
    check_attention_varlen(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, scale, out)
    bounds = cu_seqlens.tolist()
    rows, group = qkv.shape[0], q_heads // kv_heads
    inside = bounds[0] >= 0 and bounds[-1] <= rows
    ascending = all(a <= b for a, b in pairwise(bounds))
    require(inside and ascending, _OP, f"cu_seqlens is {bounds}, wanted an ascending list within 0..{rows}")
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    require(longest <= max_seqlen, _OP, f"a sequence has {longest} rows, max_seqlen is {max_seqlen}")
    out = qkv.new_empty(rows, q_heads * head_dim) if out is None else out
    out.zero_()
    heads = qkv.unflatten(1, (-1, head_dim)) if rows else qkv.reshape(0, q_heads + 2 * kv_heads, head_dim)
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        for g in range(kv_heads):
            q = heads[begin:end, g * group : (g + 1) * group].transpose(0, 1)
            k, v = heads[begin:end, q_heads + g], heads[begin:end, q_heads + kv_heads + g]
            result = attention_ref(q, k, v, causal, scale, compute).transpose(0, 1).flatten(1)
            out[begin:end, g * group * head_dim : (g + 1) * group * head_dim] = result.to(qkv.dtype)
    return out


@torch.library.custom_op("omniw4::attention_varlen", mutates_args=())
def attention_varlen(
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
    return attention_varlen_ref(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, causal, scale)


@attention_varlen.register_fake
def _(
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
    return qkv.new_empty(qkv.shape[0], q_heads * head_dim)


@torch.library.custom_op("omniw4::attention_varlen_out", mutates_args=("out",))
def attention_varlen_out(
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
    attention_varlen_ref(qkv, cu_seqlens, max_seqlen, q_heads, kv_heads, head_dim, causal, scale, out)


@attention_varlen_out.register_fake
def _(
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
    return None
