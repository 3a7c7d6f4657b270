"""Coordinate descent on the codes: what GPTQ, which never looks back, leaves on the table.

With the scales fixed, the output error ``tr(E·H·Eᵀ)`` of ``E = W - Ŵ`` is a parabola in every single weight. Given all
others, the best value of column j is ``ŵ_j + (E·H)_j / H_jj``, and the best code the nearest to it. A sweep takes the
columns in order; the error never rises.

Source: Behdin et al., QuantEase, arXiv 2309.01885, algorithm 1 (started from GPTQ's codes, as they advise).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from omniw4 import int4
from omniw4.quantize.products import add_product_
from omniw4.quantize.scales import Rounded, reciprocal


def coordinate_descent(weight: torch.Tensor, start: Rounded, hessian: torch.Tensor, sweeps: int) -> Rounded:
    """Better codes for the same scales.

    Columns of a group of 64 are taken one after another, with all rows together; the gradient of everything else is
    brought up to date once a group, by one matrix product.

    Args:
        weight: ``[..., N, K]`` float32, what is to be approximated.
        start: codes to begin with, and scales, which are kept.
        hessian: ``[..., K, K]`` float32, symmetric, with a positive diagonal (damped).
        sweeps: passes over the columns, 0 or more.
    """
    size = int4.GROUP_SIZE
    codes = start.codes.transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format)  # [..., K, N]
    steps = start.steps().transpose(-1, -2).contiguous()  # [..., K/64, N]
    gradient = hessian @ (weight - start.dequantize()).transpose(-1, -2)  # [..., K, N]
    change = torch.empty_like(codes[..., :size, :])
    for sweep in range(sweeps):
        for left in range(0, codes.shape[-2], size):
            here = slice(left, left + size)
            block, own = hessian[..., here, here], gradient[..., here, :].clone()
            _descend_columns(codes[..., here, :], own, block, steps[..., left // size, :], change)
            ahead = slice(left + size if sweep == sweeps - 1 else 0, None)  # nobody looks back after the last sweep
            add_product_(gradient[..., ahead, :], hessian[..., ahead, here], change)
    return replace(start, codes=codes.transpose(-1, -2).to(torch.int8).contiguous())


def _descend_columns(
    codes: torch.Tensor, gradient: torch.Tensor, block: torch.Tensor, step: torch.Tensor, change: torch.Tensor
) -> None:
    """The columns of one group, in place.

    Args:
        codes: ``[..., G, N]`` float32, overwritten.
        gradient: ``[..., G, N]`` ``H·Eᵀ`` of the group, consumed.
        block: ``[..., G, G]`` its diagonal block of H.
        step: ``[..., N]`` float32.
        change: ``[..., G, N]`` float32, written: by how much each error grew.
    """
    inverse, curvature = reciprocal(step), block.diagonal(dim1=-2, dim2=-1).reciprocal()  # [..., N], [..., G]
    for j in range(codes.shape[-2]):
        code, grown = codes[..., j, :], change[..., j, :]
        best = torch.addcmul(code, gradient[..., j, :] * curvature[..., j, None], inverse)
        best.round_().clamp_(int4.INT4_MIN, int4.INT4_MAX)
        torch.mul(code - best, step, out=grown)
        code.copy_(best)
        gradient[..., j + 1 :, :].addcmul_(block[..., j + 1 :, j, None], grown[..., None, :])
