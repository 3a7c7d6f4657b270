"""Replace ``nn.Linear`` modules of any model by quantized ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from omniw4 import patterns
from omniw4.errors import ModelError
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import QuantizedLinear


@dataclass
class SwapReport:
    """What :func:`swap` did: full paths replaced, and for every other linear of the model the reason why not."""

    replaced: list[str] = field(default_factory=list)
    not_replaced: dict[str, str] = field(default_factory=dict)


def swap(
    model: nn.Module,
    linears: Mapping[str, QuantizedLinear],
    *,
    include: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> SwapReport:
    """Put quantized linears into a model, in place. Nothing is changed when an error is raised.

    Args:
        model: any module tree.
        linears: quantized linears by full path in ``model``; a mapping that loads on access keeps one in memory.
        include: patterns (:mod:`omniw4.patterns`) over the paths of ``linears``; empty for all.
        skip: patterns of paths to leave as they are.

    Returns:
        The report. Linears of the model that stay are listed with the reason.

    Raises:
        PatternError: a pattern matches none of ``linears``.
        ModelError: a path of ``linears`` is not a linear of the model, or has another shape; the message names both.
    """
    paths = list(linears)
    chosen = (
        {p for pattern in include for p in patterns.select(pattern, paths, flag="include")} if include else {*paths}
    )
    skipped = {p: pattern for pattern in skip for p in patterns.select(pattern, paths, flag="skip")}
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = [path for path in paths if path in chosen and path not in skipped]
    require_linears(wanted, modules)
    replacements = {path: twin(path, linears[path], modules[path]) for path in wanted}
    return replace(model, replacements, kept=_reasons(paths, chosen, skipped))


def require_linears(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
    """Raise ModelError, naming the first, unless each path is that of a linear among ``modules``."""
    for path in paths:
        if not isinstance(modules.get(path), nn.Linear | W4A4Linear):
            raise ModelError(
                _no_such_linear(path, modules), hint="the checkpoint and the model must share module paths"
            )


def twin(path: str, quantized: QuantizedLinear, old: nn.Module) -> W4A4Linear:
    """A quantized linear as a module, where ``old`` is and ready to run; raises ModelError where the two do not fit."""
    found, expected = (quantized.out_features, quantized.in_features), (old.out_features, old.in_features)
    if found != expected:
        raise ModelError(f"{path}: the quantized linear is {list(found)}, the model's is {list(expected)} [N, K]")
    if (quantized.bias is None) != (old.bias is None):
        has, lacks = ("model", "quantized linear") if quantized.bias is None else ("quantized linear", "model")
        raise ModelError(f"{path}: the {has} has a bias, the {lacks} has none")
    device, dtype = _place(old)
    new = W4A4Linear.from_quantized(quantized.to(device))
    new.train(old.training)
    new.prepare(dtype=dtype)
    return new


def replace(model: nn.Module, replacements: Mapping[str, nn.Module], kept: Mapping[str, str]) -> SwapReport:
    """Set modules by path and report on every linear of the model."""
    for path, module in replacements.items():
        model.set_submodule(path, module)
    left = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)]
    return SwapReport([*replacements], {path: kept.get(path, "the checkpoint does not quantize it") for path in left})


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of ``names``, to put a missing and a found name side by side; None when nothing is close."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return close[0] if close else None


def _no_such_linear(path: str, modules: Mapping[str, nn.Module]) -> str:
    if path in modules:
        return f"{path} is a {type(modules[path]).__name__} in the model, wanted an nn.Linear"
    other = nearest(path, (p for p, m in modules.items() if isinstance(m, nn.Linear)))
    return f"the model has no linear {path!r}" + (f"; the most similar is {other!r}" if other else "")


def _reasons(paths: Sequence[str], chosen: set[str], skipped: Mapping[str, str]) -> dict[str, str]:
    left_out = {path: "no include pattern matches it" for path in paths if path not in chosen}
    return left_out | {path: f"skip pattern {pattern!r}" for path, pattern in skipped.items()}


def _place(linear: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where a linear is and, as far as it tells, in which dtype its activations come."""
    if isinstance(linear, nn.Linear):
        return linear.weight.device, linear.weight.dtype
    return next(linear.buffers()).device, None
