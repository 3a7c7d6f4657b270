"""The searched smoothing: the model of the output error against what it models, and the choice made by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantize_problems import inputs, spec_of, stats_of, weights

from omniw4 import config, int4
from omniw4.config import Recipe
from omniw4.errors import StatsError
from omniw4.hadamard import hadamard64
from omniw4.quantize.layer import Linear, quantize_group, quantize_groups, quantize_layer
from omniw4.quantize.lowrank import svd_lowrank
from omniw4.quantize.scales import round_to_nearest
from omniw4.quantize.smooth import STRENGTHS, activation_noise, expected_peak, modelled_error, smoothing_vector
from omniw4.tensors import LinearSpec, LinearStats


def gaussian(tokens: int, variances: torch.Tensor, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, len(variances), generator=g, dtype=torch.float64) * variances.sqrt()


def test_expected_peak_where_it_is_known() -> None:
    def of(*variances: float) -> float:
        return float(expected_peak(torch.tensor(variances, dtype=torch.float64)))

    assert of(3.0) == pytest.approx(3, rel=1e-4)  # E[x²]
    assert of(2.0, 2.0) == pytest.approx(2 * (1 + 2 / math.pi), rel=1e-4)
    assert of(3.0, 0.0, 0.0) == pytest.approx(3, rel=1e-4)
    assert of(0.0, 0.0) == 0
    for size in (1e-20, 1e20):
        assert of(size, 2 * size) == pytest.approx(size * of(1.0, 2.0), rel=1e-9)


def test_expected_peak_of_uneven_groups_is_what_samples_have() -> None:
    one_large = torch.tensor([50.0] + [1.0] * 63)
    variances = torch.stack([torch.ones(64), torch.linspace(-3, 3, 64).exp(), one_large]).double()
    for one, found in zip(variances, expected_peak(variances), strict=True):
        sampled = float(gaussian(40_000, one).square().amax(1).mean())
        assert float(found) == pytest.approx(sampled, rel=0.02)


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_noise_of_int4_activations_is_what_the_codes_add(scale_type: str) -> None:
    variances = torch.cat([torch.ones(64), torch.linspace(0.5, 4, 64)]).double()
    x = gaussian(6000, variances).float()
    if scale_type == "integer":
        rebuilt = int4.dequantize_integer(*int4.quantize_groups_integer(x))
    else:
        rebuilt = int4.dequantize(*int4.quantize_groups(x))
    added = (x - rebuilt).double().square().mean(0).view(2, 64).mean(1)
    modelled = activation_noise(variances, 4, 1.0).view(2, 64)
    assert torch.equal(modelled[:, :1].expand(2, 64), modelled), "one step a group"
    torch.testing.assert_close(modelled[:, 0], added, rtol=0.1, atol=0)


def test_noise_of_int8_and_16_bit_activations() -> None:
    variances = torch.linspace(0.5, 4, 128).double()
    x = gaussian(6000, variances).float()
    added = (x - int4.dequantize(*int4.quantize_tokens(x))).double().square().mean()
    torch.testing.assert_close(activation_noise(variances, 8, 1.0).mean(), added, rtol=0.05, atol=0)
    assert not activation_noise(variances, 16, 1.0).any()
    half = activation_noise(variances, 8, 0.5)
    torch.testing.assert_close(half, activation_noise(variances, 8, 1.0) / 4)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_the_modelled_error_is_that_of_the_outputs(act_bits: int, branch: bool) -> None:
    """Weights to nearest, activations rounded for their codes alone, and nothing shared between the two."""
    variances = torch.linspace(0.3, 3, 128).double()
    x, w = gaussian(6000, variances).float(), weights(48, 128)
    w += weights(48, 3, seed=5, std=0.3) @ weights(3, 128, seed=6, std=0.3)
    low = svd_lowrank(w, 8, torch.float16).product() if branch else torch.zeros_like(w)
    spec = LinearSpec(act_bits=act_bits, act_clip=1.0)  # type: ignore[arg-type]
    hessian = x.T @ x / len(x)
    codes = round_to_nearest(w - low, hessian.diagonal(), "search").dequantize()
    rounded = {4: int4.quantize_groups, 8: int4.quantize_tokens}
    moved = int4.dequantize(*rounded[act_bits](x)) if act_bits < 16 else x
    left = x @ w.T - moved @ codes.T - x @ low.T
    measured = float(left.double().square().sum() / (x @ w.T).double().square().sum())
    assert modelled_error(w, w - low, hessian, spec, "search") == pytest.approx(measured, rel=0.06)


def recipe_with(**changes: Any) -> Recipe:
    return config.load("default", {"recipe": {"smooth": {"strength": "search"}, **changes}}).recipe


def group_of(recipe: Recipe, k: int = 192, seed: int = 0) -> tuple[list[Linear], LinearStats]:
    """Two linears of one input, with columns as uneven as its channels."""
    uneven = torch.randn(k, generator=torch.Generator().manual_seed(seed + 50)).exp()
    ws = [weights(n, k, seed=seed + n) * uneven for n in (64, 32)]
    return [Linear(f"a.{i}", w, None, spec_of(recipe)) for i, w in enumerate(ws)], stats_of(inputs(500, k, seed))


@pytest.mark.parametrize("name", ["default", "float16", "seed", "w4a8"])
def test_the_choice_is_the_strength_with_the_least_modelled_error(name: str) -> None:
    """Spelled out once more, from x' itself."""
    recipe = config.load(name, {"recipe": {"smooth": {"strength": "search"}}}).recipe
    specs = replace(spec_of(recipe), scale_type=recipe.weights.scale_type, act_bits=recipe.activations.bits)
    linears = [replace(one, spec=specs) for one in group_of(recipe)[0]]
    x = inputs(500, 192)
    stats = stats_of(x)
    normalized = recipe.gptq.hessian == "normalized"
    rows = x / x.square().mean(1, keepdim=True).sqrt() if normalized else x
    errors = []
    for strength in STRENGTHS:
        act, weight = rows.square().mean(0).sqrt(), torch.cat([one.weight for one in linears]).square().mean(0).sqrt()
        s = smoothing_vector(act, weight, strength, torch.float16).float() if strength else torch.ones(192)
        rotate = torch.eye(192)
        if recipe.rotation != "none":
            rotate = hadamard64(rotate)
        moved = rows / s @ rotate
        h = (moved.T @ moved / len(moved)).float()
        error = 0.0
        for one in linears:
            w = one.weight * s @ rotate
            low = svd_lowrank(w, 16, torch.float16).product() if recipe.lowrank.init == "svd_weight" else 0 * w
            error += modelled_error(w, w - low, h, one.spec, recipe.weights.scale)
        errors.append(error)
    wanted = STRENGTHS[min(range(len(STRENGTHS)), key=errors.__getitem__)]
    results = quantize_group(linears, stats, recipe)
    assert [report.smooth_strength for _, report in results] == [wanted] * 2
    assert len(set(errors)) == len(errors)


def test_the_result_is_that_of_the_chosen_strength_bit_for_bit() -> None:
    recipe = recipe_with()
    linears, stats = group_of(recipe)
    searched = quantize_group(linears, stats, recipe)
    strength = searched[0][1].smooth_strength
    assert strength in STRENGTHS[1:]
    named = quantize_group(linears, stats, recipe_with(smooth={"strength": strength}))
    for (found, _), (wanted, report) in zip(searched, named, strict=True):
        assert report.smooth_strength is None, "nothing was searched"
        assert found.tensors().keys() == wanted.tensors().keys()
        for tensor_name, tensor in wanted.tensors().items():
            assert torch.equal(tensor, found.tensors()[tensor_name]), tensor_name


def test_equal_errors_go_to_the_smallest() -> None:
    recipe = recipe_with()
    for w, x in ((torch.zeros(32, 128), inputs(300, 128)), (weights(32, 128), torch.zeros(300, 128))):
        quantized, report = quantize_layer(w, None, stats_of(x), spec_of(recipe), recipe)
        assert report.smooth_strength == STRENGTHS[0] == min(STRENGTHS)
        assert quantized.smooth is not None
        assert bool((quantized.smooth == 1).all()), "no smoothing"
    assert list(STRENGTHS) == sorted(set(STRENGTHS))


def test_of_independent_channels_the_search_finds_what_the_theory_says() -> None:
    recipe = recipe_with(lowrank={"rank": 0})
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(1))
    x = x * (2 * torch.randn(128, generator=torch.Generator().manual_seed(2))).exp()
    _, report = quantize_layer(weights(64, 128), None, stats_of(x), spec_of(recipe), recipe)
    assert report.smooth_strength is not None
    assert 0.4 <= report.smooth_strength <= 0.6


def test_a_batch_chooses_as_each_does_alone() -> None:
    recipe = recipe_with()
    pairs = [group_of(recipe, seed=seed) for seed in range(3)]
    together = quantize_groups([linears for linears, _ in pairs], [stats for _, stats in pairs], recipe)
    for (linears, stats), results in zip(pairs, together, strict=True):
        alone = quantize_group(linears, stats, recipe)
        assert [r.smooth_strength for _, r in results] == [r.smooth_strength for _, r in alone]
        assert torch.equal(results[0][0].smooth, alone[0][0].smooth)  # type: ignore[arg-type]


def test_a_search_needs_statistics_also_in_a_recipe_that_needs_none_otherwise() -> None:
    free = config.load("rtn").recipe
    searched = config.load("rtn", {"recipe": {"smooth": {"strength": "search"}}}).recipe
    assert not free.needs_stats
    assert searched.needs_stats
    linears, stats = group_of(searched)
    with pytest.raises(StatsError, match=r"a\.0"):
        quantize_group(linears, None, searched)
    _, report = quantize_group(linears, stats, searched)[0]
    assert report.method == "rtn"
    assert report.smooth_strength in STRENGTHS
