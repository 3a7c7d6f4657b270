"""One linear, or several that read the same input, from FP weights to :class:`QuantizedLinear`.

Smoothing and rotation are folded in, the Hessian is factorised once for all linears of an input,
:mod:`omniw4.quantize.alternate` finds codes and low-rank branch, and what was found is assembled and reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from omniw4 import int4
from omniw4.config import Recipe
from omniw4.errors import NonFiniteError, StatsError
from omniw4.quantize.alternate import Outcome, Quantizer, Stack, alternate, complete, without
from omniw4.quantize.gptq import Factor, factorise, gptq
from omniw4.quantize.lowrank import Whitening
from omniw4.quantize.measure import relative_error, sqnr_db
from omniw4.quantize.order import activation_order
from omniw4.quantize.refine import coordinate_descent
from omniw4.quantize.rotate import transform_weight
from omniw4.quantize.scales import round_to_nearest
from omniw4.quantize.space import InputSpace, Linear, input_spaces, stacked
from omniw4.tensors import LayerReport, LinearSpec, LinearStats, QuantizedLinear

_MANY = 0.01  # share of a linear's groups above which a loss is worth a warning

Results = list[tuple[QuantizedLinear, LayerReport]]


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


def quantize_group(linears: Sequence[Linear], stats: LinearStats | None, recipe: Recipe) -> Results:
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
    return quantize_groups([linears], [stats], recipe)[0]


def quantize_groups(
    groups: Sequence[Sequence[Linear]], stats: Sequence[LinearStats | None], recipe: Recipe
) -> list[Results]:
    """Quantize B groups of equal shapes at once, such as q, k and v of B blocks.

    The columns of GPTQ are taken one after another, so a GPU spends its time on launches; B groups share them. Each
    group's result is its own: a Hessian that needs more damping than the recipe's sends its batch through one by one.

    Args:
        groups: for each input its linears, see :func:`quantize_group`; the i-th linears of all groups have equal
            shape and spec.
        stats: of each input.
    """
    began = time.perf_counter()
    for linears, known in zip(groups, stats, strict=True):
        _check(linears, known, recipe)
    spaces, objective = input_spaces(groups, stats, recipe)
    factored = recipe.gptq.enabled or recipe.lowrank.whiten == "full"
    factor = _factorise(objective, recipe) if factored and objective is not None else None
    if factor is not None and factor.log and len(groups) > 1:
        del spaces, objective, factor  # each of the groups makes its own
        return [quantize_group(linears, known, recipe) for linears, known in zip(groups, stats, strict=True)]
    hessian = None if objective is None else objective.float()
    del objective
    whitening = _whitening(hessian, factor, recipe)
    stacks = [_stack([group[i] for group in groups], spaces, whitening) for i in range(len(groups[0]))]
    method, quantize = _choose_quantizer(hessian, factor, groups[0][0], recipe)
    outcomes = alternate(stacks, hessian, quantize, recipe)
    data_free = [_data_free_errors(twins, spaces) for twins in zip(*groups, strict=True)] if method == "gptq" else None
    seconds = (time.perf_counter() - began) / len(groups)
    results: list[Results] = []
    for b, (linears, space, known) in enumerate(zip(groups, spaces, stats, strict=True)):
        rows = sum(one.weight.shape[0] for one in linears)
        mine: Results = []
        for i, one in enumerate(linears):
            outcome, target = outcomes[i][b], stacks[i].target[b]
            report = _report(one, target, outcome, space, factor, method)
            report.rtn_error = data_free[i][b] if data_free is not None else report.relative_error
            report.seconds = seconds * one.weight.shape[0] / rows
            quantized = _assemble(one, outcome, space.smooth)
            report.warnings += _warnings(quantized, report, known)
            mine.append((quantized, report))
        results.append(mine)
    return results


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
        if recipe.needs_stats:
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


def _factorise(objective: torch.Tensor, recipe: Recipe) -> Factor:
    """Of the Hessians ``[B, K, K]`` float64, in the order in which the recipe takes the groups."""
    if recipe.gptq.order == "natural":
        return factorise(objective, recipe.gptq.damp)
    return factorise(objective, recipe.gptq.damp, activation_order(objective))


def _whitening(hessian: torch.Tensor | None, factor: Factor | None, recipe: Recipe) -> Whitening | None:
    """What the recipe whitens the low-rank branch by; None for inputs that calibration never saw."""
    if recipe.lowrank.whiten == "full" and factor is not None and factor.upper is not None:
        return Whitening(factor.upper, diagonal=False, order=factor.order)
    if recipe.lowrank.whiten == "diagonal" and hessian is not None:
        diagonal = hessian.diagonal(dim1=-2, dim2=-1)
        damped = diagonal + recipe.gptq.damp * diagonal.mean(-1, keepdim=True)
        return Whitening(damped.rsqrt(), diagonal=True) if bool((damped > 0).all()) else None
    return None


def _stack(twins: Sequence[Linear], spaces: Sequence[InputSpace], whitening: Whitening | None = None) -> Stack:
    """The same linear of several groups, in the transformed space."""
    first = twins[0]
    targets = [transform_weight(t.weight, t.spec.rotation, s.smooth) for t, s in zip(twins, spaces, strict=True)]
    return Stack(torch.stack(targets), first.spec.rank, first.stored_dtype, whitening)


def _data_free_errors(twins: Sequence[Linear], spaces: Sequence[InputSpace]) -> list[float]:
    """Relative error of ``configs/rtn.yaml``: nearest codes of W minus its own SVD, no smoothing."""
    stack = _stack(twins, [InputSpace()] * len(twins))
    nothing_known = torch.ones_like(stack.target[0, 0])
    start = without(stack.target, stack.fit(stack.target))
    rounded = round_to_nearest(start, nothing_known, "search", twins[0].spec.scale_type)
    _, iterates = complete(stack, rounded, stacked([space.unsmoothed for space in spaces]))
    return [iterate.error for iterate in iterates]


def _choose_quantizer(
    hessian: torch.Tensor | None, factor: Factor | None, first: Linear, recipe: Recipe
) -> tuple[str, Quantizer]:
    rule, scale_type = recipe.weights.scale, first.spec.scale_type
    if recipe.gptq.enabled and hessian is not None and factor is not None and factor.upper is not None:
        damped = hessian.clone()
        diagonal = damped.diagonal(dim1=-2, dim2=-1)  # [B, K], a view
        diagonal.add_(factor.damp * diagonal.mean(-1, keepdim=True))
        size, sweeps = recipe.gptq.block_size, recipe.gptq.sweeps
        compensate = partial(
            gptq, upper=factor.upper, rule=rule, block_size=size, scale_type=scale_type, order=factor.order
        )
        descend = partial(coordinate_descent, hessian=damped, sweeps=sweeps) if sweeps else None
        return "gptq", Quantizer(compensate, descend)
    if hessian is not None:
        importance = hessian.diagonal(dim1=-2, dim2=-1)
    else:
        importance = torch.ones(first.weight.shape[-1], device=first.weight.device)
    method = "rtn-fallback" if recipe.gptq.enabled and factor is not None else "rtn"
    return method, Quantizer(partial(round_to_nearest, importance=importance, rule=rule, scale_type=scale_type))


def _assemble(one: Linear, outcome: Outcome, smooth: torch.Tensor | None) -> QuantizedLinear:
    rounded, low = outcome.best.rounded, outcome.best.low
    return QuantizedLinear(
        spec=one.spec,
        qweight=int4.pack_nibbles(rounded.codes.contiguous()),
        w_scales=rounded.scales.contiguous(),
        proj_down=None if low is None else low.down.contiguous(),
        proj_up=None if low is None else low.up.contiguous(),
        smooth=smooth,
        bias=None if one.bias is None else one.bias.to(one.stored_dtype),
        row_scales=None if rounded.rows is None else rounded.rows.contiguous(),
    )


def _report(
    one: Linear, target: torch.Tensor, outcome: Outcome, space: InputSpace, factor: Factor | None, method: str
) -> LayerReport:
    best, errors = outcome.best, outcome.errors
    error = best.error
    if space.plain is not None:
        rest = without(target - best.rounded.dequantize(), best.low)
        error = relative_error(rest, target, space.plain)
    n, k = target.shape
    return LayerReport(
        path=one.path,
        out_features=n,
        in_features=k,
        method=method,
        relative_error=error,
        sqnr_db=sqnr_db(error),
        damp=0.0 if factor is None else factor.damp,
        rank_energy=best.rank_energy,
        rounds=errors,
        best_round=min(range(len(errors)), key=errors.__getitem__),
        smooth_strength=space.strength,
        warnings=[] if factor is None else list(factor.log),
    )


def _warnings(quantized: QuantizedLinear, report: LayerReport, stats: LinearStats | None) -> list[str]:
    found = []
    if report.rtn_error < report.relative_error:
        found.append("worse than the data-free recipe on its own calibration statistics")
    raised, groups = _raised_scales(quantized), quantized.w_scales.numel()
    if raised > _MANY * groups:
        found.append(f"{raised} of {groups} groups hold weights too small for a 16-bit scale")
    if stats is not None and stats.tokens < report.in_features:
        found.append(f"only {stats.tokens} calibration tokens for {report.in_features} input features")
    return found
