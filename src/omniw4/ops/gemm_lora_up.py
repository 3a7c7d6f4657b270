"""``gemm_lora_up``: the integer GEMM, its dequantization, the low-rank branch, bias and epilogue.

Contract
    With N = out_features and everything accumulated in FP32, groups in the order of K::

        acc[m, n] = Σ_g (Σ_{k in g} qact[m, k] · qweight[n, k]) · a_scales[m, g] · w_scales[n, g]
                  + Σ_r lora_act[m, r] · proj_up[n, r] + bias[n]
        plain      y[M, N]   = round(acc)
        residual   y[M, N]   = round(acc + residual)
        swiglu     y[M, N/2] = round(silu(acc[:, 2j]) · acc[:, 2j+1])        gate and up rows interleaved

    =========  ===============================================================================================
    qact       canonical: [M, K/2] uint8 (act_bits 4), [M, K] int8 (8), [M, K] float (16); or a family's layout
    a_scales   canonical: [M, K/64] (4), [M, 1] (8), [M, 0] (16) float16; or a family's layout
    qweight    canonical: [N, K/2] uint8; or a family's layout (omniw4.repack)
    w_scales   canonical: [N, K/64] float16; or a family's layout
    lora_act   [M, R] float32, or packed by pack_lora_act; None for R = 0
    proj_up    [N, R] float (rows may be padded past N in a family's layout); None for R = 0
    bias       [N] float, or None
    residual   [M, N] of dtype, with epilogue "residual" only
    tokens, out_features, act_bits
    epilogue   "plain", "residual" or "swiglu" (N even)
    dtype      of y: float16 or bfloat16 (float32 on a CPU)
    layout     "canonical" or a kernel family's
    =========  ===============================================================================================

    Exact: each group's int32 sum (:func:`group_sums_ref`). Bounded: y, by twice the error of plain torch in dtype
    against FP64. A zero scale contributes exactly 0; NaN or inf scales make their own row or column NaN, nothing
    else; a row's bits never depend on the other rows.

    The reference evaluates the same sum as one FP32 product of dequantized operands (a code times its FP16 scale is
    exact in FP32), which a CPU does fast; only the order of the FP32 additions differs from the formula.

    Errors: OpError for wrong shapes, dtypes, devices or options.

Source: SVDQuant, arXiv 2411.05007; Atom, arXiv 2310.19102 (per-group dequantization).
"""

from __future__ import annotations

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
from omniw4.ops.layouts import CANONICAL, WGMMA_S8, activation_shapes, require_canonical
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
) -> None:
    """What holds in every layout; the shapes of qact, a_scales, qweight and w_scales are the layout's to check, and in
    wgmma_s8 those of the low-rank branch."""
    require_act_bits(_OP, act_bits)
    allowed = HALVES if qact.is_cuda else FLOATS
    require(dtype in allowed, _OP, f"dtype is {dtype}, wanted one of {', '.join(map(str, allowed))} on {qact.device}")
    require(epilogue in EPILOGUES, _OP, f"epilogue is {epilogue!r}, wanted one of {', '.join(EPILOGUES)}")
    require_same_device(
        _OP, qact, a_scales=a_scales, qweight=qweight, w_scales=w_scales, lora_act=lora_act, proj_up=proj_up,
        bias=bias, residual=residual,
    )  # fmt: skip
    require_dtype(_OP, "a_scales", a_scales, torch.float32 if layout == WGMMA_S8 else torch.float16)
    require_dtype(_OP, "qweight", qweight, torch.uint8)
    require_dtype(_OP, "w_scales", w_scales, torch.float16)
    require((lora_act is None) == (proj_up is None), _OP, "lora_act and proj_up come together, found only one")
    if lora_act is not None and proj_up is not None and layout != WGMMA_S8:
        _check_low_rank(lora_act, proj_up, tokens, out_features)
    if bias is not None:
        require_dtype(_OP, "bias", bias, *FLOATS)
        require_shape(_OP, "bias", bias, (out_features,))
    require((residual is not None) == (epilogue == "residual"), _OP, "residual goes with epilogue 'residual' only")
    if residual is not None:
        require_dtype(_OP, "residual", residual, dtype)
        require_shape(_OP, "residual", residual, (tokens, out_features))
    require(epilogue != "swiglu" or out_features % 2 == 0, _OP, f"swiglu needs even N, found {out_features}")


def _check_low_rank(lora_act: torch.Tensor, proj_up: torch.Tensor, tokens: int, out_features: int) -> None:
    require_dtype(_OP, "proj_up", proj_up, *FLOATS)
    rank = proj_up.shape[1]
    require(
        proj_up.dim() == 2 and proj_up.shape[0] >= out_features,
        _OP,
        f"proj_up has shape {list(proj_up.shape)}, wanted [{out_features}, R]",
    )
    if lora_act.dim() == 4:
        require_dtype(_OP, "packed lora_act", lora_act, *HALVES)
        require_shape(_OP, "packed lora_act", lora_act, ((tokens + 15) // 16, (rank + 15) // 16, 32, 8))
    else:
        require_dtype(_OP, "lora_act", lora_act, torch.float32)
        require_shape(_OP, "lora_act", lora_act, (tokens, rank))


def _check_canonical(
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor,
    tokens: int,
    out_features: int,
    act_bits: int,
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
    wanted = activation_shapes(CANONICAL, tokens, width, act_bits, qact.dtype)
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
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The contract in plain torch, layout "canonical"; ``compute=torch.float64`` (and dtype float32) judges others."""
    check_gemm_lora_up(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, residual, tokens, out_features, act_bits,
        epilogue, dtype,
    )  # fmt: skip
    _check_canonical(qact, a_scales, qweight, w_scales, tokens, out_features, act_bits)
    if act_bits == 16:
        acts = qact.to(compute)
    else:
        acts = int4.dequantize(int4.unpack_nibbles(qact) if act_bits == 4 else qact, a_scales, compute)
    weight = int4.dequantize(int4.unpack_nibbles(qweight), w_scales, compute)  # [N, K]
    acc = matmul_rows(acts, weight.T)
    if lora_act is not None and proj_up is not None and proj_up.shape[1] > 0:
        low_rank = unpack_lora_act(lora_act, tokens, proj_up.shape[1]) if lora_act.dim() == 4 else lora_act
        acc = acc + matmul_rows(low_rank.to(compute), proj_up[:out_features].to(compute).T)
    if bias is not None:
        acc = acc + bias.to(compute)
    if residual is not None:
        acc = acc + residual.to(compute)
    if epilogue == "swiglu":
        # the strided view keeps torch on one code path for every element, so a row's bits do not depend on M
        acc = F.silu(acc[:, 0::2]) * acc[:, 1::2]
    return acc.to(dtype, copy=True)


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
) -> torch.Tensor:
    require_canonical(layout, _OP)
    return gemm_lora_up_ref(
        qact, a_scales, qweight, w_scales, lora_act, proj_up, bias, residual, tokens, out_features, act_bits,
        epilogue, dtype,
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
) -> torch.Tensor:
    width = out_features // 2 if epilogue == "swiglu" else out_features
    return qact.new_empty((tokens, width), dtype=dtype)
