"""GPTQ as blocked linear algebra.

Columns are rounded in order; the error of each is spread over the columns still to come so that the layer's output
changes least. With ``H⁻¹ = UᵀU`` (U upper triangular) the update after column j is the rank-1 step
``W[:, j+1:] -= (w_j - q_j)/U_jj · U[j, j+1:]``. It runs at three sizes: single columns inside a group of 64 (the op
``round_columns``, in units of the group's step), whole groups inside a block (one matrix product), whole blocks on
everything to the right (one matrix product). All rows move together, and weights are held transposed, so a column is
contiguous.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1. The scale of a group is chosen when the group is
reached, from weights that already carry the compensation of everything to the left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omniw4 import int4
from omniw4.products import add_product_
from omniw4.quantize.columns import diagonal_blocks, round_columns
from omniw4.quantize.order import columns_of, permute, permute_hessian
from omniw4.quantize.scales import IntegerScales, Rounded, ScaleRule, reciprocal, scales_for
from omniw4.tensors import ScaleType

DAMP_STEPS = (1.0, 10.0, 100.0, 1000.0)  # the recipe's damping is multiplied by these, in turn


@dataclass(frozen=True)
class Factor:
    """``H⁻¹ = UᵀU`` of a damped Hessian, shared by every linear that reads the same input."""

    upper: torch.Tensor | None  # [..., K, K] float32, upper triangular; None when no damping was enough
    damp: float  # the last fraction of the mean diagonal that was tried
    log: list[str] = field(default_factory=list)  # one sentence a failed attempt
    order: torch.Tensor | None = None  # [..., K/64] of the groups, which the factor's rows and columns are in


def factorise(hessian: torch.Tensor, damp: float, order: torch.Tensor | None = None) -> Factor:
    """The upper Cholesky factor of the inverse of ``H + damp·mean(diag H)·I``.

    Factorises H with its order reversed, ``JHJ = LLᵀ``; then ``U = (J·L·J)⁻¹`` is one triangular solve away, and
    the inverse of H, whose condition number is the square of U's, is never formed.

    A dead channel (zero row and column) gets the damping alone on its diagonal: nothing spreads into or out of it,
    so its weights round to nearest. A Hessian that is not positive definite (rounding of a singular one, damaged
    statistics) is retried with each of :data:`DAMP_STEPS`; every failure is logged.

    Args:
        hessian: ``[..., K, K]`` float64, symmetric, finite.
        damp: fraction of the mean diagonal to begin with.
        order: ``[..., K/64]`` of the groups, in which H is factorised (:mod:`omniw4.quantize.order`); None: as it is.
    """
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1)  # [...]
    if not bool((mean > 0).all()):
        return Factor(None, damp, ["the Hessian is zero: calibration saw no non-zero input"])
    eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    log: list[str] = []
    for step in DAMP_STEPS:
        damped = hessian + (damp * step * mean)[..., None, None] * eye
        if order is not None:
            damped = permute_hessian(damped, order)
        lower, info = torch.linalg.cholesky_ex(damped.flip(-1, -2))
        if not bool(info.any()) and bool(torch.isfinite(lower).all()):
            upper = torch.linalg.solve_triangular(lower.flip(-1, -2), eye.expand_as(lower), upper=True)
            return Factor(upper.float(), damp * step, log, order)
        log.append(f"the Hessian with damping {damp * step:g} is not positive definite")
    return Factor(None, damp * DAMP_STEPS[-1], log)


def gptq(
    weight: torch.Tensor,
    upper: torch.Tensor,
    rule: ScaleRule,
    block_size: int = 128,
    scale_type: ScaleType = "float16",
    order: torch.Tensor | None = None,
) -> Rounded:
    """Round ``weight`` to INT4 codes with error compensation.

    Args:
        weight: ``[..., N, K]`` float32, K a multiple of 64.
        upper: ``[..., K, K]`` float32, see :func:`factorise`.
        rule: how a group's scale is chosen (:mod:`omniw4.quantize.scales`); a column's importance is ``1/U_jj²``,
            what an error there costs once later columns have made up for it.
        block_size: columns between two updates of everything to the right; changes speed, and the result only by
            rounding.
        scale_type: integer scales are multiples of a row scale that is chosen before the first column.
        order: ``[..., K/64]`` in which the groups are taken (:mod:`omniw4.quantize.order`), and ``upper`` was made;
            None: as they lie. Codes and scales come back where their columns are in ``weight``.
    """
    if order is not None:
        taken = gptq(permute(weight, columns_of(order)), upper, rule, block_size, scale_type)
        back = order.argsort(-1)
        return Rounded(permute(taken.codes, columns_of(back)), permute(taken.scales, back), taken.rows)
    group = int4.GROUP_SIZE
    diagonal = upper.diagonal(dim1=-2, dim2=-1)  # [..., K]
    importance = diagonal.square().reciprocal()
    kind = scales_for(weight.float(), importance, rule, scale_type)
    w = weight.float().transpose(-1, -2).clone(memory_format=torch.contiguous_format)  # [..., K, N], consumed
    codes = torch.empty_like(w)
    k = w.shape[-2]
    scales = torch.empty((*w.shape[:-2], k // group, w.shape[-1]), dtype=kind.dtype, device=w.device)
    errors = torch.empty_like(w[..., : min(block_size, k), :])
    spread = upper / diagonal[..., None]  # what an error of 1 in column j takes from the columns behind it
    coupling = diagonal_blocks(spread).neg_()
    for start in range(0, k, block_size):
        end = min(start + block_size, k)
        for left in range(start, end, group):
            right = left + group
            chosen = kind.choose(w[..., left:right, :], importance[..., left:right])
            scales[..., left // group, :] = chosen
            step = kind.step(chosen)[..., None, :]
            found, change = round_columns(w[..., left:right, :] * reciprocal(step), coupling[..., left // group, :, :])
            codes[..., left:right, :] = found
            err = torch.mul(change, step, out=errors[..., left - start : right - start, :])
            if right < end:
                add_product_(w[..., right:end, :], spread[..., left:right, right:end].transpose(-1, -2), err, -1.0)
        if end < k:
            onward = spread[..., start:end, end:].transpose(-1, -2)
            add_product_(w[..., end:, :], onward, errors[..., : end - start, :], -1.0)
    rows = kind.rows if isinstance(kind, IntegerScales) else None
    return Rounded(codes.transpose(-1, -2).to(torch.int8), scales.transpose(-1, -2).contiguous(), rows)
