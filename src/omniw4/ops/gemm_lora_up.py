"""``gemm_lora_up``: the integer GEMM, its dequantization, the low-rank branch, bias and epilogue.

Contract
    With N = out_features and everything accumulated in FP32, groups in the order of K::

        acc[m, n] = Σ_g (Σ_{k in g} qact[m, k] · qweight[n, k]) · a_scales[m, g] · w_scales[n, g]
                  + Σ_r lora_act[m, r] · proj_up[n, r] + bias[n]
        plain      y[M, N]   = round(acc)
        residual   y[M, N]   = round(acc + residual)
        swiglu     y[M, N/2] = round(silu(acc[:, 2j]) · acc[:, 2j+1])        gate and up rows interleaved

    With integer scales (row_scales given) the sum over k is one integer, not a sum of scaled groups::

        sum[m, n] = Σ_k (a_scales[m, g] · qact[m, k]) · (w_scales[n, g] · qweight[n, k])     act_bits 4
        sum[m, n] = Σ_k qact[m, k] · (w_scales[n, g] · qweight[n, k])                        act_bits 8
        acc[m, n] = sum[m, n] · t[m] · row_scales[n] + Σ_r … + bias[n]                       t = token_scales | a_scales

    ============  ============================================================================================
    qact          canonical: [M, K/2] uint8 (act_bits 4), [M, K] int8 (8), [M, K] float (16); or a family's layout
    a_scales      canonical: [M, K/64] (4), [M, 1] (8), [M, 0] (16) float16; uint8 where token_scales are given; or a
                  family's layout
    qweight       canonical: [N, K/2] uint8; or a family's layout (omniw4.repack)
    w_scales      canonical: [N, K/64] float16, uint8 where row_scales are given; or a family's layout
    lora_act      [M, R] float32, or packed by pack_lora_act; None for R = 0
    proj_up       [N, R] float (rows may be padded past N in a family's layout); None for R = 0
    bias          [N] float, or None
    residual      [M, N] of dtype, with epilogue "residual" only
    tokens, out_features, act_bits
    epilogue      "plain", "residual" or "swiglu" (N even)
    dtype         of y: float16 or bfloat16 (float32 on a CPU)
    layout        "canonical" or a kernel family's
    row_scales    [N] float32 (may be padded past N in a family's layout) where the weights have integer scales
    token_scales  canonical: [M] float32 with row_scales and act_bits 4; else None or empty
    segment_ends  None, or where linears that share an input are stacked: rows from segment_ends[i] on take the next R
                  columns of lora_act, which is [M, S·R] then. Ascending, up to three; multiples of 64 in wgmma_s8
    weights_ready no kernel still running writes the weights: they may be read before the kernel ahead is done
    ============  ============================================================================================

    Exact: each group's int32 sum (:func:`group_sums_ref`), with integer scales the int32 sum over all of K
    (:func:`integer_sums_ref`; K up to 131072). Bounded: y, by twice the error of plain torch in dtype against FP64. A
    zero scale contributes exactly 0; NaN or inf scales make their own row or column NaN, nothing else; a row's bits
    never depend on the other rows.

    With FP16 scales the reference evaluates the same sum as one FP32 product of dequantized operands (a code times its
    FP16 scale is exact in FP32), which a CPU does fast; only the order of the FP32 additions differs from the formula.

    Errors: OpError for wrong shapes, dtypes, devices or options.

Source: SVDQuant, arXiv 2411.05007; Atom, arXiv 2310.19102 (per-group dequantization).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from omniw4 import int4
from omniw4.ops.checks import (
    FLOATS,
    HALVES,
    require,
    require_act_bits,
    require_dtype,
    require_same_device,
    require_shape,
)
from omniw4.ops.layouts import BYTES, CANONICAL, FLOAT16, INTEGER, WGMMA_S8, activation_shapes, require_canonical
from omniw4.ops.pack_lora_act import unpack_lora_act
from omniw4.ops.rows import matmul_rows

_OP = "gemm_lora_up"
EPILOGUES = ("plain", "residual", "swiglu")


def check_gemm_lora_up(
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
    layout: str = CANONICAL,
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    segment_ends: Sequence[int] | None = None,
) -> None:
    """What holds in every layout; the shapes of qact, a_scales, qweight and w_scales are the layout's to check, and in
    wgmma_s8 those of the low-rank branch."""
    require_act_bits(_OP, act_bits)
    allowed = HALVES if qact.is_cuda else FLOATS
    require(dtype in allowed, _OP, f"dtype is {dtype}, wanted one of {', '.join(map(str, allowed))} on {qact.device}")
    require(epilogue in EPILOGUES, _OP, f"epilogue is {epilogue!r}, wanted one of {', '.join(EPILOGUES)}")
    require_same_device(
        _OP, qact, a_scales=a_scales, qweight=qweight, w_scales=w_scales, lora_act=lora_act, proj_up=proj_up,
        bias=bias, residual=residual, row_scales=row_scales, token_scales=token_scales,
    )  # fmt: skip
    integer = row_scales is not None
    a_scales_dtype = torch.uint8 if integer and act_bits == 4 else torch.float16
    require_dtype(_OP, "a_scales", a_scales, torch.float32 if layout in BYTES else a_scales_dtype)
    require_dtype(_OP, "qweight", qweight, torch.uint8)
    require_dtype(_OP, "w_scales", w_scales, torch.uint8 if integer else torch.float16)
    if row_scales is not None:
        require_dtype(_OP, "row_scales", row_scales, torch.float32)
        found = list(row_scales.shape)
        require(
            row_scales.dim() == 1 and (len(row_scales) == out_features or layout != CANONICAL),
            _OP, f"row_scales has shape {found}, wanted [{out_features}]",
        )  # fmt: skip
    require((lora_act is None) == (proj_up is None), _OP, "lora_act and proj_up come together, found only one")
    if lora_act is not None and proj_up is not None and layout != WGMMA_S8:
        _check_low_rank(lora_act, proj_up, tokens, out_features, 1 + len(segment_ends or ()))
    if segment_ends is not None:
        ends = [0, *segment_ends, out_features]
        require(
            len(ends) <= 5 and all(a < b for a, b in pairwise(ends)),
            _OP, f"segment_ends are {list(segment_ends)}, wanted up to three, ascending, below {out_features}",
        )  # fmt: skip
    if bias is not None:
        require_dtype(_OP, "bias", bias, *FLOATS)
        require_shape(_OP, "bias", bias, (out_features,))
    require((residual is not None) == (epilogue == "residual"), _OP, "residual goes with epilogue 'residual' only")
    if residual is not None:
        require_dtype(_OP, "residual", residual, dtype)
        require_shape(_OP, "residual", residual, (tokens, out_features))
    require(epilogue != "swiglu" or out_features % 2 == 0, _OP, f"swiglu needs even N, found {out_features}")


def _check_low_rank(
    lora_act: torch.Tensor, proj_up: torch.Tensor, tokens: int, out_features: int, segments: int
) -> None:
    require_dtype(_OP, "proj_up", proj_up, *FLOATS)
    require(
        proj_up.dim() == 2 and proj_up.shape[0] >= out_features,
        _OP,
        f"proj_up has shape {list(proj_up.shape)}, wanted [{out_features}, R]",
    )
    rank = proj_up.shape[1]
    if lora_act.dim() == 4:
        require_dtype(_OP, "packed lora_act", lora_act, *HALVES)
        require_shape(_OP, "packed lora_act", lora_act, ((tokens + 15) // 16, (rank + 15) // 16, 32, 8))
    else:
        require_dtype(_OP, "lora_act", lora_act, torch.float32)
        require_shape(_OP, "lora_act", lora_act, (tokens, segments * rank))


def _check_canonical(
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor,
    tokens: int,
    out_features: int,
    act_bits: int,
    row_scales: torch.Tensor | None,
    token_scales: torch.Tensor | None,
) -> None:
    require(qweight.dim() == 2, _OP, f"qweight has shape {list(qweight.shape)}, wanted [N, K/2]")
    width = qweight.shape[1] * 2
    require(
        width > 0 and width % int4.GROUP_SIZE == 0,
        _OP,
        f"qweight has K = {width}, wanted a multiple of {int4.GROUP_SIZE}",
    )
    require_shape(_OP, "qweight", qweight, (out_features, width // 2))
    require_shape(_OP, "w_scales", w_scales, (out_features, width // int4.GROUP_SIZE))
    scale_type = FLOAT16 if row_scales is None else INTEGER
    wanted = activation_shapes(CANONICAL, tokens, width, act_bits, qact.dtype, scale_type)
    found = (0,) if token_scales is None else tuple(token_scales.shape)
    require(
        found == wanted.token_scales or tokens == 0,
        _OP,
        f"token_scales has shape {list(found)}, wanted {list(wanted.token_scales)} beside "
        f"{'no ' if row_scales is None else ''}row_scales and {act_bits}-bit activations",
    )
    if token_scales is not None:
        require_dtype(_OP, "token_scales", token_scales, torch.float32)
    require_dtype(_OP, "qact", qact, *(FLOATS if act_bits == 16 else (wanted.qact_dtype,)))
    require_shape(_OP, "qact", qact, wanted.qact)
    require_shape(_OP, "a_scales", a_scales, wanted.a_scales)


def group_sums_ref(qact: torch.Tensor, qweight: torch.Tensor) -> torch.Tensor:
    """The integer sum of every group, exact.

    Args:
        qact: activation codes ``[M, K]`` int8 (unpacked).
        qweight: weight codes ``[N, K]`` int8 (unpacked).

    Returns:
        ``[M, N, K/64]`` int32.
    """
    # [K/64, M, 64] x [K/64, 64, N]: integers below 2^24 all the way (64 · 128 · 8), so FP32 holds every partial sum
    acts = int4.split_groups(qact).float().transpose(0, 1)
    weights = int4.split_groups(qweight).float().permute(1, 2, 0)
    return (acts @ weights).permute(1, 2, 0).to(torch.int32)


def integer_sums_ref(acts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The integer sum over all of K, exact.

    Args:
        acts: ``[M, K]`` int8: codes times their integer scales (:func:`omniw4.int4.widen`), or INT8 codes.
        weights: ``[N, K]`` int8: codes times their integer scales.

    Returns:
        ``[M, N]`` int32.
    """
    span = 1024  # 1024 · 128 · 128 = 2^24, up to which FP32 holds every integer
    sums = torch.zeros(acts.shape[0], weights.shape[0], dtype=torch.int32, device=acts.device)
    for a, w in zip(acts.split(span, 1), weights.split(span, 1), strict=True):
        sums += (a.float() @ w.float().T).to(torch.int32)  # exact, so the order in which BLAS adds does not matter
    return sums


def gemm_lora_up_ref(
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
    row_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    segment_ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """The contract in plain torch, layout "canonical"; ``compute=torch.float64`` (and dtype float32) judges others, and
    a 16-bit ``compute`` is the plain torch they are judged by: a product of dequantized operands in that dtype."""
    check_gemm_lora_up(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, residual, tokens, out_features, act_bits,
        epilogue, dtype, CANONICAL, row_scales, token_scales, segment_ends,
    )  # fmt: skip
    _check_canonical(
        qact, a_scales, qweight, w_scales, tokens, out_features, act_bits, row_scales, token_scales
    )  # fmt: skip
    acc = _product(qact, a_scales, qweight, w_scales, act_bits, row_scales, token_scales, compute)
    if lora_act is not None and proj_up is not None and proj_up.shape[1] > 0:
        low_rank = unpack_lora_act(lora_act, tokens, proj_up.shape[1]) if lora_act.dim() == 4 else lora_act
        acc = acc + _low_rank_product(low_rank.to(compute), proj_up[:out_features].to(compute), segment_ends)
    if bias is not None:
        acc = acc + bias.to(compute)
    if residual is not None:
        acc = acc + residual.to(compute)
    if epilogue == "swiglu":
        # the strided view keeps torch on one code path for every element, so a row's bits do not depend on M
        acc = F.silu(acc[:, 0::2]) * acc[:, 1::2]
    return acc.to(dtype, copy=True)


def _low_rank_product(
    lora_act: torch.Tensor, proj_up: torch.Tensor, segment_ends: Sequence[int] | None
) -> torch.Tensor:
    """``[M, S·R]`` by ``[N, R]``, every segment of rows with columns of its own: ``[M, N]``."""
    ends = [0, *(segment_ends or ()), proj_up.shape[0]]
    columns = lora_act.split(proj_up.shape[1], dim=1)
    parts = [matmul_rows(c, proj_up[a:b].T) for c, a, b in zip(columns, ends[:-1], ends[1:], strict=True)]
    return torch.cat(parts, dim=1)


def _product(
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor,
    act_bits: int,
    row_scales: torch.Tensor | None,
    token_scales: torch.Tensor | None,
    compute: torch.dtype,
) -> torch.Tensor:
    """``deq(qact)·deq(qweight)ᵀ``: ``[M, N]`` of ``compute``."""
    acts = int4.unpack_nibbles(qact) if act_bits == 4 else qact
    weights = int4.unpack_nibbles(qweight)  # [N, K]
    if row_scales is None:
        left = acts.to(compute) if act_bits == 16 else int4.dequantize(acts, a_scales, compute)
        return matmul_rows(left, int4.dequantize(weights, w_scales, compute).T)
    weights = int4.widen(weights, w_scales)
    if act_bits == 16:
        return matmul_rows(acts.to(compute), weights.to(compute).T) * row_scales.to(compute)
    outer = a_scales.float()  # [M, 1]
    if act_bits == 4 and token_scales is not None:
        acts, outer = int4.widen(acts, a_scales), token_scales[:, None]
    if compute in HALVES:
        left, right = acts.to(compute) * outer.to(compute), weights.to(compute) * row_scales[:, None].to(compute)
        return matmul_rows(left, right.T)
    return integer_sums_ref(acts, weights).to(compute) * outer.to(compute) * row_scales.to(compute)


@torch.library.custom_op("omniw4::gemm_lora_up", mutates_args=())
def gemm_lora_up(
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
    require_canonical(layout, _OP)
    return gemm_lora_up_ref(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, residual, tokens, out_features, act_bits,
        epilogue, dtype, row_scales, token_scales, segment_ends=segment_ends,
    )  # fmt: skip


@gemm_lora_up.register_fake
def _(
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
    width = out_features // 2 if epilogue == "swiglu" else out_features
    return qact.new_empty((tokens, width), dtype=dtype)
