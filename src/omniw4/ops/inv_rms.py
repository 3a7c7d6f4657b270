"""``inv_rms``: one inverse root mean square a row.

Contract
    ``out[m] = 1 / sqrt(mean_k(x[m, k]²) + eps)``, squares and sum in FP32.

    ========  =======================================================
    x         [M, K] float16 or bfloat16 (float32 on a CPU), any K >= 1, any strides
    eps       float, not negative
    returns   [M] float32
    ========  =======================================================

    The order of summation is free, so kernels are compared with a bound (a few units in the last place); a row's
    bits never depend on the other rows. A row of zeros gives ``1 / sqrt(eps)``; NaN or inf stay in their row.

    Errors: OpError for a wrong rank, dtype, width or eps.

Source: RMSNorm, arXiv 1910.07467; the formula of transformers' Qwen3RMSNorm.
"""

from __future__ import annotations

import torch

from omniw4.ops.checks import require, require_activations

_OP = "inv_rms"


def check_inv_rms(x: torch.Tensor, eps: float) -> None:
    require_activations(_OP, "x", x)
    require(x.shape[1] >= 1, _OP, "x has no columns, wanted at least one")
    require(eps >= 0, _OP, f"eps is {eps}, wanted a number that is not negative")


def inv_rms_ref(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract in plain torch."""
    check_inv_rms(x, eps)
    squares = x.float().square()
    # torch splits a reduction to one single value among threads, in another order than the same row among others
    if squares.shape[0] == 1:
        squares = squares.repeat(2, 1)
    return torch.rsqrt(squares.mean(-1) + eps)[: x.shape[0]].clone()


@torch.library.custom_op("omniw4::inv_rms", mutates_args=())
def inv_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return inv_rms_ref(x, eps)


@inv_rms.register_fake
def _(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.float32)
