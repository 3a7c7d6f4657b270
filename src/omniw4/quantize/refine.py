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
from omniw4.products import add_product_, product
from omniw4.quantize.columns import diagonal_blocks, round_columns
from omniw4.quantize.scales import Rounded, reciprocal


def coordinate_descent(weight: torch.Tensor, start: Rounded, hessian: torch.Tensor, sweeps: int) -> Rounded:
    """Better codes for the same scales.

    Columns of a group of 64 are taken one after another, with all rows together, in units of the group's step (the op
    ``round_columns``); the gradient of everything else is brought up to date once a group, by one matrix product.

    Args:
        weight: ``[..., N, K]`` float32, what is to be approximated.
        start: codes to begin with, and scales, which are kept.
        hessian: ``[..., K, K]`` float32, symmetric, with a positive diagonal (damped).
        sweeps: passes over the columns, 0 or more.
    """
    size = int4.GROUP_SIZE
    codes = start.codes.transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format)  # [..., K, N]
    steps = start.steps().transpose(-1, -2).contiguous()  # [..., K/64, N]
    gradient = product(hessian, (weight - start.dequantize()).transpose(-1, -2))  # [..., K, N]: H·Eᵀ
    curvature = hessian.diagonal(dim1=-2, dim2=-1).reciprocal()  # [..., K]
    coupling = diagonal_blocks(hessian) * int4.split_groups(curvature)[..., None, :]
    for sweep in range(sweeps):
        for left in range(0, codes.shape[-2], size):
            here, step = slice(left, left + size), steps[..., left // size, None, :]
            known = codes[..., here, :]
            best = torch.addcmul(known, gradient[..., here, :] * curvature[..., here, None], reciprocal(step))
            found, change = round_columns(best, coupling[..., left // size, :, :], known)
            codes[..., here, :] = found
            ahead = slice(left + size if sweep == sweeps - 1 else 0, None)  # nobody looks back after the last sweep
            add_product_(gradient[..., ahead, :], hessian[..., ahead, here], change.mul_(step))
    return replace(start, codes=codes.transpose(-1, -2).to(torch.int8).contiguous())
