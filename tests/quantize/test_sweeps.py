"""A recipe with sweeps: the codes fit the branch they are stored with, whatever the scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantize_problems import inputs, spec_of, stats_of, weights

from omniw4.config import Recipe
from omniw4.quantize.layer import quantize_layer
from omniw4.tensors import LinearSpec


def recipe_with(sweeps: int, scale_type: str = "integer", rank: int = 4, rounds: int = 2) -> Recipe:
    return Recipe(
        weights={"scale": "search", "scale_type": scale_type},
        gptq={"sweeps": sweeps},
        lowrank={"rank": rank, "rounds": rounds, "init": "svd_weight"},
    )


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
@pytest.mark.parametrize("rank", [0, 4])
def test_sweeps_lower_the_reported_error(scale_type: str, rank: int) -> None:
    x, w = inputs(600, 192), weights(48, 192)
    errors = []
    for sweeps in (0, 1, 4):
        recipe = recipe_with(sweeps, scale_type, rank, rounds=1)
        linear, report = quantize_layer(w, None, stats_of(x), _spec(recipe), recipe)
        errors.append(report.relative_error)
        left = w.double() - linear.dequantize(torch.float64)
        found = float((x.double() @ left.T).square().sum() / (x.double() @ w.double().T).square().sum())
        assert report.relative_error == pytest.approx(found, rel=2e-2)
        assert report.rounds[report.best_round] == min(report.rounds)
    assert errors[1] < 0.995 * errors[0]
    assert errors[2] < errors[1]


def test_no_code_can_be_improved_against_the_stored_branch() -> None:
    """What many sweeps end in: given scales and branch, no single code of a row has a neighbour of less error."""
    x, w = inputs(400, 64, seed=2), weights(6, 64, seed=3)
    recipe = recipe_with(60, rounds=1).model_copy(update={"rotation": "none"})
    linear, _ = quantize_layer(w, None, stats_of(x), _spec(recipe), recipe)
    hessian = (x.double().T @ x.double()) / len(x)
    hessian += recipe.gptq.damp * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    left = w.double() - linear.dequantize(torch.float64)  # [6, 64]
    assert linear.row_scales is not None
    step = (linear.row_scales.double() * linear.w_scales[:, 0].double())[:, None]
    codes = torch.round(linear.dequantize_codes(torch.float64) / step)
    gradient = left @ hessian
    for change in (-1, 1):  # error of moving one code by one step, less the error as it is
        growth = -2 * change * step * gradient + (change * step).square() * hessian.diagonal()
        allowed = (codes + change >= -8) & (codes + change <= 7)
        worst = (growth / (left * gradient).sum(1, keepdim=True))[allowed].min()
        assert worst > -1e-4, f"change {change}: {worst}"


def _spec(recipe: Recipe) -> LinearSpec:
    return replace(spec_of(recipe), scale_type=recipe.weights.scale_type)
