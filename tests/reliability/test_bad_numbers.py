"""Weights, Hessians and activations as no model should have them: finite, the same twice, and reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omniw4 import int4
from omniw4.config import Recipe
from omniw4.errors import NonFiniteError
from omniw4.quantize.layer import quantize_layer, relative_error
from omniw4.runtime import linear as runtime
from omniw4.tensors import LayerReport, LinearSpec, LinearStats, QuantizedLinear

N, K = 24, 192
RECIPES = {
    "default": Recipe(weights={"scale": "search"}),
    "smoothed": Recipe(
        smooth={"strength": 0.5, "measure": "rms"}, gptq={"hessian": "normalized"}, lowrank={"init": "svd_weight"}
    ),
    "smoothed by absmax, no rotation": Recipe(smooth={"strength": 0.5}, rotation="none"),
    "data-free": Recipe(gptq={"enabled": False}, weights={"scale": "search"}),
}


def changed(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    copy = x.clone()
    change(copy)
    return copy


GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(N, K, generator=GENERATOR) * 0.05
X = torch.randn(512, K, generator=GENERATOR)
LARGEST = W.sign() * 65504

# name -> weights, what a warning must say, relative error of the weights that may be left
WEIGHTS: dict[str, tuple[torch.Tensor, str, float]] = {
    "ordinary": (W, "", 0.1),
    "zero": (W * 0, "", 0.0),
    "a zero row": (changed(W, lambda w: w[3].zero_()), "", 0.1),
    "a zero column": (changed(W, lambda w: w[:, 5].zero_()), "", 0.1),
    "a zero group": (changed(W, lambda w: w[:, 64:128].zero_()), "", 0.1),
    "constant": (torch.full((N, K), 0.25), "", 0.01),
    "one row": (W[:1], "", 0.1),
    "FP16's largest": (LARGEST, "", 0.1),
    "FP16's largest, one sign": (LARGEST.abs(), "", 0.1),
    "one weight of 60000": (changed(W, lambda w: w[2, 7:8].fill_(60000.0)), "", 0.01),
    "FP16's subnormal": ((W.sign() * 6e-8).half(), "too small for a 16-bit scale", 0.6),
    "below FP16": (W * 1e-12, "too small for a 16-bit scale", 0.6),
    "below all": (W * 1e-38, "too small for a 16-bit scale", 1.0),
}
HESSIANS: dict[str, tuple[torch.Tensor, str]] = {
    "dead channels": (changed(X, lambda x: x[:, 10:30].zero_()), ""),
    "a dead group": (changed(X, lambda x: x[:, :64].zero_()), ""),
    "one token": (X[:1], "only 1 calibration tokens"),
    "fewer tokens than features": (X[:7], "only 7 calibration tokens"),
    "no input": (X * 0, "the Hessian is zero"),
    "tiny": (X * 1e-18, ""),
    "beyond FP32's squares": (X * 1e-22, ""),
    "huge": (X * 1e15, ""),
    "one loud channel": (changed(X, lambda x: x[:, 7].mul_(1e6)), ""),
    "one value": (torch.ones(512, K), ""),
    "one direction": (X[:, :1] * torch.randn(1, K, generator=GENERATOR), ""),
}


def stats_of(x: torch.Tensor) -> LinearStats:
    power = x.square().mean(1, keepdim=True)
    normed = torch.where(power > 0, x / power.clamp(min=1e-45).sqrt(), torch.zeros_like(x))
    plain, normalized = x.T @ x / len(x), normed.T @ normed / len(x)
    return LinearStats(plain, normalized, x.abs().amax(0), x.square().mean(0).sqrt(), len(x))


def quantize(weight: torch.Tensor, x: torch.Tensor, recipe: Recipe) -> tuple[QuantizedLinear, LayerReport]:
    spec = LinearSpec(rank=16, smooth=recipe.smooth.enabled, rotation=recipe.rotation)
    stats = stats_of(x) if recipe.needs_stats else None
    return quantize_layer(weight, None, stats, spec, recipe)


def check(weight: torch.Tensor, x: torch.Tensor, recipe: Recipe, warning: str, most: float) -> LayerReport:
    linear, report = quantize(weight, x, recipe)
    for name, tensor in linear.tensors().items():
        assert tensor.isfinite().all(), f"{name} is not finite"
    assert (linear.w_scales >= 0).all()
    again, report_again = quantize(weight, x, recipe)
    for name, tensor in linear.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), f"{name} differs when it is made again"
    assert report_again.relative_error == report.relative_error
    for figure in (report.relative_error, report.rank_energy, report.damp, report.rtn_error):
        assert math.isfinite(figure), report
    left = float((linear.dequantize(torch.float64) - weight.double()).norm())
    assert left <= most * float(weight.double().norm()), f"{left / float(weight.double().norm())} is left"
    assert warning in "; ".join(report.warnings), report.warnings
    outputs = runtime.W4A4Linear(linear)(torch.randn(3, K, generator=torch.Generator().manual_seed(1)))
    assert outputs.isfinite().all()
    return report


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, recipe: str) -> None:
    weight, warning, most = WEIGHTS[name]
    report = check(weight, X, RECIPES[recipe], warning, most)
    if name == "below all":
        assert report.relative_error > 0.9, "a linear that lost everything is not reported as perfect"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "data-free"])
@pytest.mark.parametrize("name", HESSIANS)
def test_hessians(name: str, recipe: str) -> None:
    x, warning = HESSIANS[name]
    report = check(W, x, RECIPES[recipe], warning, 0.25)
    assert report.method == ("rtn-fallback" if name == "no input" else "gptq")
    if name != "no input":
        assert report.relative_error > 0, "an error lost in rounding is reported as none"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 65536.0, -1e30])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_16_bits_cannot_hold_are_refused(value: float, recipe: str) -> None:
    weight = changed(W, lambda w: w[3, 70:71].fill_(value))
    with pytest.raises(NonFiniteError, match=r"linear\.weight holds") as caught:
        quantize(weight, X, RECIPES[recipe])
    assert "--skip 'linear'" in caught.value.hint


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["hessian", "hessian_normalized", "absmax"])
def test_statistics_that_are_not_finite_are_refused(value: float, field: str) -> None:
    stats = stats_of(X)
    getattr(stats, field).view(-1)[5] = value
    with pytest.raises(NonFiniteError, match=f"{field} of linear"):
        quantize_layer(W, None, stats, LinearSpec(), RECIPES["default"])


def test_the_error_is_a_quotient_whatever_the_size() -> None:
    """FP32 holds neither 1e-60 nor 1e60, and the relative error is the same all the same."""
    wanted = relative_error(W * 0.1, W, stats_of(X).hessian)
    for size in (1e-30, 1e-15, 1.0, 1e12, 1e18):
        found = relative_error(W * size * 0.1, W * size, stats_of(X).hessian)
        assert found == pytest.approx(wanted, rel=1e-5), size
        assert relative_error(W * 0.1, W, stats_of(X).hessian * size) == pytest.approx(wanted, rel=1e-5), size


@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(value: float, act_bits: int) -> None:
    linear, _ = quantize_layer(W, None, stats_of(X), LinearSpec(act_bits=act_bits), RECIPES["default"])
    module = runtime.W4A4Linear(linear)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2))
    whole = module(x)
    spoilt = module(changed(x, lambda t: t[2, 100:101].fill_(value)))
    assert spoilt[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(spoilt[kept], whole[kept])


@pytest.mark.parametrize("act_bits", [4, 8])
def test_activations_at_the_edges_of_fp16(act_bits: int) -> None:
    """Zero tokens give the bias, subnormal and the largest ones finite outputs."""
    bias = torch.arange(N).float()
    linear, _ = quantize_layer(W * 0.01, bias, stats_of(X), LinearSpec(act_bits=act_bits), RECIPES["default"])
    module = runtime.W4A4Linear(linear)
    x = torch.ones(4, K) * torch.tensor([0.0, 6e-8, 2.0**-14, 65504.0])[:, None]
    y = module(x)
    assert torch.equal(y[0], bias.half().float())
    assert y.isfinite().all()


def test_scales_are_normal_or_zero() -> None:
    """Whatever the group's size: 0 for zeros, otherwise between the smallest normal and the largest FP16 number."""
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 6e-8, 6.1e-5, 1.0, 65504.0, 3e38])
    scales = int4.scale_from_absmax(sizes, int4.INT4_MAX)
    assert scales[0] == 0
    assert (scales[1:] >= int4.SCALE_MIN).all()
    assert (scales[1:] <= int4.SCALE_MAX).all()
