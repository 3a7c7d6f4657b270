"""``rms_norm``: the residual sum, its RMSNorm, and where wanted the norm's FP8 codes, in one read of the row.

Contract
    With ``round`` to the dtype of x and all else in FP32::

        sum  = round(x + delta)                                  # x itself when delta is None
        y    = round(round(sum / sqrt(mean(sum²) + eps)) · weight)
        fp8: codes and scales of y as in the op quantize_fp8

    ========  =============================================================================
    x         [M, K] float16 or bfloat16 (float32 on a CPU), any strides
    delta     [M, K] of the same dtype, or None
    weight    [K] of the same dtype
    eps       float, not negative
    fp8       whether y comes as codes
    returns   y [M, K] of the dtype (codes: float8_e4m3fn), scales [M, 1] float32 (without fp8 [M, 0]), and sum [M, K]
              (without delta [0, K]: it is x)
    ========  =============================================================================

    The order of summation is free, so y is bounded (a unit in the last place where it decides a rounding); sum is
    exact. A row's bits never depend on the other rows.

    Errors: OpError for wrong shapes, dtypes, devices or eps.

Source: RMSNorm, arXiv 1910.07467; the roundings of transformers' Qwen3RMSNorm.
"""

from __future__ import annotations

import torch

from omniw4.ops.checks import require, require_activations, require_dtype, require_same_device, require_shape
from omniw4.ops.inv_rms import inv_rms_ref
from omniw4.ops.quantize_fp8 import FP8, fp8_rows

_OP = "rms_norm"


def check_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> None:
    require_activations(_OP, "x", x)
    require(x.shape[1] >= 1, _OP, "x has no columns, wanted at least one")
    require(eps >= 0, _OP, f"eps is {eps}, wanted a number that is not negative")
    require_same_device(_OP, x, delta=delta, weight=weight)
    require_dtype(_OP, "weight", weight, x.dtype)
    require_shape(_OP, "weight", weight, (x.shape[1],))
    if delta is not None:
        require_dtype(_OP, "delta", delta, x.dtype)
        require_shape(_OP, "delta", delta, x.shape)


def rms_norm_ref(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract in plain torch."""
    check_rms_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    y = (total.float() * inv_rms_ref(total, eps)[:, None]).to(x.dtype) * weight
    written = x.new_empty(0, x.shape[1]) if delta is None else total
    if fp8:
        return *fp8_rows(y), written
    return y, x.new_empty((x.shape[0], 0), dtype=torch.float32), written


@torch.library.custom_op("omniw4::rms_norm", mutates_args=())
def rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rms_norm_ref(x, delta, weight, eps, fp8)


@rms_norm.register_fake
def _(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = x.new_empty(x.shape, dtype=FP8 if fp8 else x.dtype)
    scales = x.new_empty((x.shape[0], 1 if fp8 else 0), dtype=torch.float32)
    return y, scales, x.new_empty((0 if delta is None else x.shape[0], x.shape[1]))
