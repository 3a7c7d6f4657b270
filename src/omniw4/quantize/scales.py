"""Choosing the scale of each weight group, and rounding to nearest with it.

Both choices end on the FP16 grid before any code is made, and codes follow :func:`omniw4.int4.encode`, so what is
minimised is what is stored.
"""

from __future__ import annotations

from typing import Literal

import torch

from omniw4 import int4

ScaleRule = Literal["absmax", "search"]

# Fractions of absmax that the grid may span. With 15 steps the best one for Gaussian groups of 64 lies near 0.85.
SHRINK_GRID = tuple(1.0 - 0.025 * step for step in range(17))  # 1.0 … 0.6


def group_scales(group: torch.Tensor, importance: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """One FP16 scale for each row of a group.

    Args:
        group: ``[..., G, N]`` float32: the G columns that share a scale, one group a row of N.
        importance: ``[..., G]`` weight of each column's squared error (a Hessian's diagonal).
        rule: ``"absmax"``: ``absmax/7``; ``"search"``: the fraction of it in :data:`SHRINK_GRID` with the least
            weighted squared error of rounding to nearest, the largest such fraction on a tie.

    Returns:
        ``[..., N]`` float16; 0 for an all-zero group.
    """
    absmax = group.abs().amax(-2)  # [..., N]
    best = int4.scale_from_absmax(absmax, int4.INT4_MAX)
    if rule == "absmax":
        return best
    importance = importance.to(group.dtype)[..., None, :]  # [..., 1, G]
    best_error = torch.full_like(absmax, float("inf"))
    for shrink in SHRINK_GRID:
        scales = int4.scale_from_absmax(absmax, int4.INT4_MAX, shrink)
        rounded = round_to_grid(group, scales)
        error = (importance @ (rounded.sub_(group)).square_()).squeeze(-2)  # [..., N]
        better = error < best_error
        best = torch.where(better, scales, best)
        best_error = torch.where(better, error, best_error)
    return best


def round_to_grid(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest representable values: ``[..., G, N]`` with scales ``[..., N]``, one column at a time or many.

    The same arithmetic as ``int4.encode`` followed by ``int4.dequantize``, fused and without the NaN branch (weights
    are checked to be finite before).
    """
    scale = scales.float()[..., None, :]
    codes = (values * reciprocal(scale)).round_().clamp_(int4.INT4_MIN, int4.INT4_MAX)
    return codes.mul_(scale)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """``1/scale`` in FP32, 0 where the scale is 0."""
    return torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())


def round_to_nearest(
    weight: torch.Tensor, importance: torch.Tensor, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize without compensation: every weight to its nearest code.

    Args:
        weight: ``[..., N, K]`` float32, K a multiple of 64.
        importance: ``[..., K]`` weight of each column's squared error; used by ``"search"`` alone.

    Returns:
        codes ``[..., N, K]`` int8 and scales ``[..., N, K/64]`` float16.
    """
    *lead, n, k = weight.shape
    columns = weight.transpose(-1, -2).reshape(*lead, k // int4.GROUP_SIZE, int4.GROUP_SIZE, n)
    scales = group_scales(columns, int4.split_groups(importance), rule).transpose(-1, -2)  # [..., N, K/64]
    codes = int4.encode(int4.split_groups(weight), scales[..., None], int4.INT4_MIN, int4.INT4_MAX)
    return codes.reshape(weight.shape), scales.contiguous()
