"""One linear, or several that read the same input, from FP weights to :class:`QuantizedLinear`.

The loop is the seed's: ``Q = GPTQ(W - L)``, ``L = SVD_r(W - Q)``, again, until the error no longer falls; the best
iterate is kept. L is rounded to its stored 16-bit type before Q is fitted to it and before the error is taken, so
what is measured is what is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from omniw4 import int4
from omniw4.config import Recipe
from omniw4.errors import NonFiniteError, StatsError
from omniw4.quantize.gptq import Factor, factorise, gptq
from omniw4.quantize.lowrank import LowRank, energy_share, svd_lowrank
from omniw4.quantize.refine import coordinate_descent
from omniw4.quantize.rotate import transform_hessian, transform_weight
from omniw4.quantize.scales import Rounded, round_to_nearest
from omniw4.quantize.smooth import smoothing_vector
from omniw4.tensors import LayerReport, LinearSpec, LinearStats, QuantizedLinear


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
    """What several linears of one input share: the transform and the Hessians behind it."""

    smooth: torch.Tensor | None  # [K] 16-bit
    objective: torch.Tensor | None  # [K, K] float32: the recipe's Hessian of x'; None without statistics
    plain: torch.Tensor | None  # [K, K] float32: the plain one, for the report
    unsmoothed: torch.Tensor | None  # [K, K] float32: the plain one without smoothing, for the data-free comparison
    factor: Factor | None  # None when GPTQ is off


_SMALLEST = 1e-24  # output energy below which terms of the sum may have been lost in FP32
_MANY = 0.01  # share of a linear's groups above which a loss is worth a warning

Quantizer = Callable[[torch.Tensor], Rounded]  # of [N, K] float32


@dataclass
class _Iterate:
    rounded: Rounded  # [N, K]
    low: LowRank | None
    error: float
    rank_energy: float


def quantize_layer(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stats: LinearStats | None,
    spec: LinearSpec,
    recipe: Recipe,
    *,
    path: str = "linear",
) -> tuple[QuantizedLinear, LayerReport]:
    """Quantize one linear; see :func:`quantize_group`."""
    return quantize_group([Linear(path, weight, bias, spec)], stats, recipe)[0]


def quantize_group(
    linears: Sequence[Linear], stats: LinearStats | None, recipe: Recipe
) -> list[tuple[QuantizedLinear, LayerReport]]:
    """Quantize linears that read the same input and share rotation, smoothing and the type of their scales.

    They share the Cholesky factor and go through GPTQ stacked along N; each has its own low-rank branch, its own
    best iterate and its own report. The result depends on the recipe, the weights of all of them and the statistics
    alone, never on what was quantized before.

    Args:
        linears: at least one; equal in_features, rotation, smooth flag and scale type.
        stats: statistics of their input; None is allowed when the recipe needs none.

    Raises:
        NonFiniteError: a weight, bias or statistic holds NaN or inf.
        StatsError: statistics are missing, or those of an input of another width.
    """
    began = time.perf_counter()
    k = linears[0].weight.shape[-1]
    _check(linears, stats, recipe)
    space = _input_space(linears, stats, recipe)
    targets = [transform_weight(one.weight, one.spec.rotation, space.smooth) for one in linears]
    method, quantize = _choose_quantizer(space, linears[0].spec, k, recipe, linears[0].weight.device)
    results = []
    outcomes = _alternate(linears, targets, space.objective, quantize, recipe)
    for one, target, (best, errors) in zip(linears, targets, outcomes, strict=True):
        report = _report(one, target, best, errors, space, method)
        report.rtn_error = report.relative_error
        if method == "gptq":
            report.rtn_error = _data_free_error(one, space.unsmoothed)
            if report.rtn_error < report.relative_error:
                report.warnings.append("worse than the data-free recipe on its own calibration statistics")
        results.append((_assemble(one, best, space.smooth), report))
    seconds, rows = time.perf_counter() - began, sum(one.weight.shape[0] for one in linears)
    for one, (quantized, report) in zip(linears, results, strict=True):
        report.seconds = seconds * one.weight.shape[0] / rows
        raised, groups = _raised_scales(quantized), quantized.w_scales.numel()
        if raised > _MANY * groups:
            report.warnings.append(f"{raised} of {groups} groups hold weights too small for a 16-bit scale")
        if stats is not None and stats.tokens < k:
            report.warnings.append(f"only {stats.tokens} calibration tokens for {k} input features")
    return results


def relative_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None) -> float:
    """``tr(E·H·Eᵀ) / tr(W·H·Wᵀ)``: squared output error over squared output; H = identity when None.

    0 when both are zero (a linear of zeros, kept as zeros).

    Args:
        difference: ``[N, K]`` E = W - Ŵ.
        weight: ``[N, K]``.
        hessian: ``[K, K]`` float32 or None.
    """
    error, signal = _output_energy(difference, hessian), _output_energy(weight, hessian)
    if not _SMALLEST < signal < math.inf:  # out of FP32's range, though the quotient is not: take powers of two out
        unit, scaled = _power_of_two(weight), None if hessian is None else hessian * _power_of_two(hessian)
        error, signal = _output_energy(difference * unit, scaled), _output_energy(weight * unit, scaled)
    if signal > 0:
        return error / signal
    return 0.0 if error == 0 else math.inf


def sqnr_db(error: float) -> float:
    """Signal over quantization noise in decibels of a relative error; inf for a perfect layer."""
    return 0.0 - 10 * math.log10(error) if error > 0 else math.inf


def _power_of_two(x: torch.Tensor) -> float:
    """What brings the largest magnitude near 1; 1 for zeros."""
    largest = float(x.abs().max())
    return 2.0 ** min(-math.frexp(largest)[1], 126) if largest > 0 else 1.0


def _output_energy(weight: torch.Tensor, hessian: torch.Tensor | None) -> float:
    outputs = weight if hessian is None else weight @ hessian
    return max(0.0, float((outputs * weight).sum(dtype=torch.float64)))


def _raised_scales(linear: QuantizedLinear) -> int:
    """Groups whose FP16 scale is the smallest normal number because their own would have been smaller."""
    if linear.w_scales.dtype != torch.float16:
        return 0
    return int((linear.w_scales == int4.SCALE_MIN).sum())


def _check(linears: Sequence[Linear], stats: LinearStats | None, recipe: Recipe) -> None:
    for one in linears:
        for name, tensor in (("weight", one.weight), ("bias", one.bias)):
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise NonFiniteError(
                    f"{one.path}.{name} holds {bad} NaN or infinite values of {tensor.numel()}",
                    hint=f"repair the model, or leave this linear as it is with --skip '{one.path}'",
                )
            largest = 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())
            if largest > int4.SCALE_MAX:
                raise NonFiniteError(
                    f"{one.path}.{name} holds {largest:g}, and 16-bit floats end at {int4.SCALE_MAX:g}",
                    hint=f"repair the model, or leave this linear as it is with --skip '{one.path}'",
                )
    path, k = linears[0].path, linears[0].weight.shape[-1]
    if stats is None:
        if recipe.gptq.enabled or recipe.smooth.strength > 0:
            raise StatsError(
                f"the recipe needs calibration statistics of {path}, and there are none",
                hint="run omniw4 calibrate and give its folder with --stats, or use the data-free --config rtn",
            )
        return
    for name in ("hessian", "hessian_normalized", "absmax"):
        tensor = getattr(stats, name)
        if tensor.shape[-1] != k:
            raise StatsError(
                f"{name} of {path} is for {tensor.shape[-1]} input features, the linear has {k}",
                hint="the statistics are of another model: run omniw4 calibrate on this one",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"{name} of {path} holds NaN or infinite values",
                hint="run omniw4 calibrate again; it leaves out rows that are not finite and counts them",
            )


def _input_space(linears: Sequence[Linear], stats: LinearStats | None, recipe: Recipe) -> InputSpace:
    if stats is None:
        return InputSpace(None, None, None, None, None)
    first = linears[0]
    smooth = _smoothing(linears, stats, recipe) if first.spec.smooth else None
    plain = transform_hessian(stats.hessian, first.spec.rotation, smooth)
    objective = plain
    if recipe.gptq.hessian == "normalized":
        objective = transform_hessian(stats.hessian_normalized, first.spec.rotation, smooth)
    factor = factorise(objective, recipe.gptq.damp) if recipe.gptq.enabled else None
    plain_fp32 = plain.float()
    objective_fp32 = plain_fp32 if objective is plain else objective.float()
    unsmoothed = plain_fp32 if smooth is None else transform_hessian(stats.hessian, first.spec.rotation).float()
    return InputSpace(smooth, objective_fp32, plain_fp32, unsmoothed, factor)


def _smoothing(linears: Sequence[Linear], stats: LinearStats, recipe: Recipe) -> torch.Tensor:
    """One vector for all linears of this input, so that it can be quantized once for them all."""
    stacked = torch.cat([one.weight for one in linears]).float()
    if recipe.smooth.measure == "rms":
        hessian = stats.hessian_normalized if recipe.gptq.hessian == "normalized" else stats.hessian
        act, weight = hessian.diagonal().clamp(min=0).sqrt(), stacked.square().mean(0).sqrt()
    else:
        act, weight = stats.absmax, stacked.abs().amax(0)
    return smoothing_vector(act, weight, recipe.smooth.strength, linears[0].stored_dtype)


def _data_free_error(one: Linear, hessian: torch.Tensor | None) -> float:
    """Relative error of ``configs/rtn.yaml``: nearest codes of W minus its own SVD, no smoothing."""
    target = transform_weight(one.weight, one.spec.rotation)
    nothing_known = torch.ones_like(target[0])
    rounded = round_to_nearest(
        _without(target, _fit_lowrank(target, one)), nothing_known, "search", one.spec.scale_type
    )
    return _complete(one, target, rounded, hessian).error


def _choose_quantizer(
    space: InputSpace, spec: LinearSpec, k: int, recipe: Recipe, device: torch.device
) -> tuple[str, Quantizer]:
    rule, scale_type = recipe.weights.scale, spec.scale_type
    if space.objective is not None and space.factor is not None and space.factor.upper is not None:
        damped = space.objective.clone()
        damped.diagonal().add_(space.factor.damp * damped.diagonal().mean())
        return "gptq", partial(_gptq_and_descent, upper=space.factor.upper, damped=damped, spec=spec, recipe=recipe)
    importance = torch.ones(k, device=device) if space.objective is None else space.objective.diagonal()
    method = "rtn" if space.factor is None else "rtn-fallback"
    return method, partial(round_to_nearest, importance=importance, rule=rule, scale_type=scale_type)


def _gptq_and_descent(
    weight: torch.Tensor, upper: torch.Tensor, damped: torch.Tensor, spec: LinearSpec, recipe: Recipe
) -> Rounded:
    """GPTQ, then the recipe's sweeps over its codes."""
    rounded = gptq(weight, upper, recipe.weights.scale, recipe.gptq.block_size, spec.scale_type)
    return coordinate_descent(weight, rounded, damped, recipe.gptq.sweeps) if recipe.gptq.sweeps else rounded


def _alternate(
    linears: Sequence[Linear],
    targets: Sequence[torch.Tensor],
    objective: torch.Tensor | None,
    quantize: Quantizer,
    recipe: Recipe,
) -> list[tuple[_Iterate, list[float]]]:
    """Quantizer and SVD in turn; per linear the best iterate and the error after each round it took part in."""
    lows: list[LowRank | None] = [None] * len(linears)
    if recipe.lowrank.init == "svd_weight":
        lows = [_fit_lowrank(target, one) for one, target in zip(linears, targets, strict=True)]
    best: list[_Iterate | None] = [None] * len(linears)
    errors: list[list[float]] = [[] for _ in linears]
    active = list(range(len(linears)))
    for _ in range(recipe.lowrank.rounds):
        stacked = torch.cat([_without(targets[i], lows[i]) for i in active])
        rounded = quantize(stacked).split([targets[i].shape[0] for i in active])
        falling = []
        for i, part in zip(active, rounded, strict=True):
            iterate = _complete(linears[i], targets[i], part, objective)
            errors[i].append(iterate.error)
            incumbent = best[i]
            if incumbent is None or iterate.error < incumbent.error:
                best[i], lows[i] = iterate, iterate.low
                if iterate.low is not None:  # without a branch every round is the same
                    falling.append(i)
        active = falling
        if not active:
            break
    return [(iterate, history) for iterate, history in zip(best, errors, strict=True) if iterate is not None]


def _complete(one: Linear, target: torch.Tensor, rounded: Rounded, objective: torch.Tensor | None) -> _Iterate:
    """Codes, the low-rank branch that fits them best, and the error of both together."""
    residual = target - rounded.dequantize()
    low = _fit_lowrank(residual, one)
    rest = _without(residual, low)
    held = energy_share(residual, rest)
    return _Iterate(rounded, low, relative_error(rest, target, objective), held)


def _fit_lowrank(residual: torch.Tensor, one: Linear) -> LowRank | None:
    return svd_lowrank(residual, one.spec.rank, one.stored_dtype) if one.spec.rank else None


def _without(weight: torch.Tensor, low: LowRank | None) -> torch.Tensor:
    return weight if low is None else weight - low.product()


def _assemble(one: Linear, best: _Iterate, smooth: torch.Tensor | None) -> QuantizedLinear:
    return QuantizedLinear(
        spec=one.spec,
        qweight=int4.pack_nibbles(best.rounded.codes.contiguous()),
        w_scales=best.rounded.scales.contiguous(),
        proj_down=None if best.low is None else best.low.down.contiguous(),
        proj_up=None if best.low is None else best.low.up.contiguous(),
        smooth=smooth,
        bias=None if one.bias is None else one.bias.to(one.stored_dtype),
        row_scales=None if best.rounded.rows is None else best.rounded.rows.contiguous(),
    )


def _report(
    one: Linear, target: torch.Tensor, best: _Iterate, errors: list[float], space: InputSpace, method: str
) -> LayerReport:
    error = best.error
    if space.plain is not None and space.plain is not space.objective:
        rest = _without(target - best.rounded.dequantize(), best.low)
        error = relative_error(rest, target, space.plain)
    n, k = target.shape
    return LayerReport(
        path=one.path,
        out_features=n,
        in_features=k,
        method=method,
        relative_error=error,
        sqnr_db=sqnr_db(error),
        damp=0.0 if space.factor is None else space.factor.damp,
        rank_energy=best.rank_energy,
        rounds=errors,
        best_round=min(range(len(errors)), key=errors.__getitem__),
        warnings=[] if space.factor is None else list(space.factor.log),
    )
