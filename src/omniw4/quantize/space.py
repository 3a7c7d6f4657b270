"""The space in which linears of one input are quantized: smoothing and rotation chosen, Hessians brought there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omniw4.config import Recipe
from omniw4.quantize.lowrank import svd_lowrank
from omniw4.quantize.rotate import transform_hessian, transform_weight
from omniw4.quantize.smooth import STRENGTHS, modelled_error, smoothing_vector
from omniw4.tensors import LinearSpec, LinearStats


@dataclass(frozen=True)
class Linear:
    """What is to be quantized."""

    path: str
    weight: torch.Tensor  # [N, K] float
    bias: torch.Tensor | None  # [N] float
    spec: LinearSpec

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of proj_down, proj_up, smooth and bias: the model's own type if it has 16 bits, else float16."""
        return self.weight.dtype if self.weight.dtype in (torch.float16, torch.bfloat16) else torch.float16


@dataclass(frozen=True)
class InputSpace:
    """What several linears of one input share besides the recipe's Hessian; all None without statistics."""

    smooth: torch.Tensor | None = None  # [K] 16-bit
    strength: float | None = None  # of the smoothing, where it was searched
    plain: torch.Tensor | None = None  # [K, K] float32: the plain one, for the report; None when it is the objective
    unsmoothed: torch.Tensor | None = None  # [K, K] float32: the plain one without smoothing, for the comparison


def input_spaces(
    groups: Sequence[Sequence[Linear]], stats: Sequence[LinearStats | None], recipe: Recipe
) -> tuple[list[InputSpace], torch.Tensor | None]:
    """What the linears of each input share, and the recipe's Hessians of x' as ``[B, K, K]`` float64."""
    spaces, objectives = [], []
    for linears, known in zip(groups, stats, strict=True):
        if known is None:
            spaces.append(InputSpace())
            continue
        first = linears[0]
        smooth, strength = _smoothing(linears, known, recipe) if first.spec.smooth else (None, None)
        normalized = recipe.gptq.hessian == "normalized"
        moments = known.hessian_normalized if normalized else known.hessian
        objectives.append(transform_hessian(moments, first.spec.rotation, smooth))
        plain = transform_hessian(known.hessian, first.spec.rotation, smooth).float() if normalized else None
        alike = plain is not None and smooth is None
        unsmoothed = plain if alike else transform_hessian(known.hessian, first.spec.rotation).float()
        spaces.append(InputSpace(smooth, strength, plain, unsmoothed))
    return spaces, stacked(objectives)


def stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Those that there are, along a new first axis; None when there are none."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return None
    return there[0][None] if len(there) == 1 else torch.stack(there)


def _smoothing(linears: Sequence[Linear], stats: LinearStats, recipe: Recipe) -> tuple[torch.Tensor, float | None]:
    """One vector for all linears of this input, so that it can be quantized once for them all, and the strength that
    was chosen for it, if it was."""
    joined = torch.cat([one.weight for one in linears]).float()
    hessian = stats.hessian_normalized if recipe.gptq.hessian == "normalized" else stats.hessian
    if recipe.smooth.measure == "rms":
        act, weight = hessian.diagonal().clamp(min=0).sqrt(), joined.square().mean(0).sqrt()
    else:
        act, weight = stats.absmax, joined.abs().amax(0)
    del joined
    dtype, wanted = linears[0].stored_dtype, recipe.smooth.strength
    if wanted != "search":
        return smoothing_vector(act, weight, wanted, dtype), None

    def vector(strength: float) -> torch.Tensor:
        return smoothing_vector(act, weight, strength, dtype) if strength else torch.ones_like(act, dtype=dtype)

    best = min(STRENGTHS, key=lambda strength: _modelled_error(linears, hessian, vector(strength), recipe))
    return vector(best), best  # of equal ones, min takes the first: the smallest


def _modelled_error(linears: Sequence[Linear], hessian: torch.Tensor, smooth: torch.Tensor, recipe: Recipe) -> float:
    """The sum of the relative errors that a smoothing vector is expected to leave in the linears of one input."""
    moved = transform_hessian(hessian, linears[0].spec.rotation, smooth).float()
    total = 0.0
    for one in linears:
        weight = transform_weight(one.weight, one.spec.rotation, smooth)
        start = weight
        if one.spec.rank and recipe.lowrank.init == "svd_weight":
            start = weight - svd_lowrank(weight, one.spec.rank, one.stored_dtype).product()
        total += modelled_error(weight, start, moved, one.spec, recipe.weights.scale)
    return total
