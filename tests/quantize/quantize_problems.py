"""Small problems for the quantizer's tests: inputs with outlier channels, and the slow algorithms they are held to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from omniw4 import int4
from omniw4.config import Recipe
from omniw4.quantize.gptq import gptq
from omniw4.quantize.scales import round_to_nearest
from omniw4.tensors import LinearSpec, LinearStats


@dataclass(frozen=True)
class Shape:
    """What a plan asks about a linear."""

    out_features: int
    in_features: int
    bias: bool = False


def inputs(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """``[tokens, K]`` float32: correlated channels, some of them large."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k, generator=g) @ torch.randn(k, k, generator=g) / k**0.5
    return mixed * torch.randn(k, generator=g).exp()


def weights(n: int, k: int, seed: int = 1, std: float = 0.05) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * std


def stats_of(x: torch.Tensor) -> LinearStats:
    """What calibration would have found in ``x [T, K]``."""
    power = x.square().mean(1, keepdim=True)
    normed = torch.where(power > 0, x / power.clamp(min=1e-30).sqrt(), torch.zeros_like(x))
    return LinearStats(
        hessian=x.T @ x / len(x),
        hessian_normalized=normed.T @ normed / len(x),
        absmax=x.abs().amax(0),
        rms=x.square().mean(0).sqrt(),
        tokens=len(x),
    )


def spec_of(recipe: Recipe) -> LinearSpec:
    return LinearSpec(
        rank=recipe.lowrank.rank,
        rotation=recipe.rotation,
        smooth=recipe.smooth.enabled,
        act_clip=recipe.activations.clip,
    )


def run_gptq(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and FP16 scales of ``gptq``."""
    rounded = gptq(*arguments, **options)
    return rounded.codes, rounded.scales


def nearest(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and FP16 scales of ``round_to_nearest``."""
    rounded = round_to_nearest(*arguments, **options)
    return rounded.codes, rounded.scales


def naive_gptq(weight: torch.Tensor, hessian: torch.Tensor, damp: float) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ as the paper states it, one element at a time, in FP64: eliminate a column of H⁻¹ after each step.

    Returns codes ``[N, K]`` int8 and scales ``[N, K/64]`` float16, scales ``absmax/7`` of the compensated group.
    """
    w = weight.double().clone()
    n, k = w.shape
    damped = hessian.double() + damp * hessian.double().diagonal().mean() * torch.eye(k, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    codes = torch.zeros(n, k, dtype=torch.int8)
    scales = torch.zeros(n, k // 64, dtype=torch.float16)
    for j in range(k):
        if j % 64 == 0:
            scales[:, j // 64] = int4.scale_from_absmax(w[:, j : j + 64].abs().amax(1), 7)
        for row in range(n):
            scale = float(scales[row, j // 64])
            code = 0 if scale == 0 else max(-8, min(7, round(float(w[row, j]) / scale)))
            codes[row, j] = code
            error = (w[row, j] - code * scale) / inverse[j, j]
            w[row, j:] -= error * inverse[j, j:]
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, scales


def best_codes(weight: torch.Tensor, hessian: torch.Tensor, scale: float, free: list[int]) -> float:
    """The least ``e·H·eᵀ`` over all codes of the columns ``free``, the other weights of the row being zero.

    Args:
        weight: ``[K]``, zero outside ``free``.
    """
    grid = torch.arange(-8, 8, dtype=torch.float64) * scale
    combinations = torch.tensor(list(itertools.product(grid.tolist(), repeat=len(free))), dtype=torch.float64)
    e = weight[free].double() - combinations
    h = hessian[free][:, free].double()
    return float(((e @ h) * e).sum(1).min())
