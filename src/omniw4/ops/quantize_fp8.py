"""``quantize_fp8``: e4m3 codes with one scale a token, the activations of an FP8 product.

Contract
    All in FP32, one rounding an operation::

        scale[m]    = max(absmax_k(x[m, k]) · fp32(1 / 448), 2^-100)      # 0 for a row of zeros
        codes[m, k] = e4m3(x[m, k] · (1 / scale[m]))            # half to even, clamped to ±448; 0 where scale is 0

    ========  =======================================================
    x         [M, K] float16 or bfloat16 (float32 on a CPU), any strides, M >= 0
    returns   codes [M, K] float8_e4m3fn, scales [M, 1] float32
    ========  =======================================================

    Exact: codes and scales, bit for bit. NaN in a row makes its scale NaN; infinity makes its codes NaN. A row's bits
    never depend on the other rows.

    Errors: OpError for a wrong rank or dtype.

Source: FP8 formats for deep learning, arXiv 2209.05433.
"""

from __future__ import annotations

import torch

from omniw4.ops.checks import require_activations

_OP = "quantize_fp8"
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_MIN = 2.0**-100


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``x [M, K]``: the contract in plain torch, shared with the ops that end in it."""
    values = x.float()
    absmax = values.abs().amax(-1, keepdim=True) if x.shape[1] else values.new_zeros(x.shape[0], 1)
    scales = torch.maximum(absmax * (1 / FP8_MAX), torch.full_like(absmax, SCALE_MIN))
    zero = absmax == 0
    inverse = torch.where(zero, torch.zeros_like(scales), scales.reciprocal())
    codes = (values * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, torch.where(zero, torch.zeros_like(scales), scales)


def quantize_fp8_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract in plain torch."""
    require_activations(_OP, "x", x)
    return fp8_rows(x)


@torch.library.custom_op("omniw4::quantize_fp8", mutates_args=())
def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8_ref(x)


@quantize_fp8.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)
