"""Laws of the quantizer, on small random weights and inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from omniw4.config import Recipe
from omniw4.quantize.gptq import factorise, gptq
from omniw4.quantize.layer import quantize_layer, relative_error
from omniw4.tensors import LinearSpec, LinearStats

PROBLEM = st.tuples(st.integers(1, 40), st.sampled_from([64, 128]), st.integers(0, 2**31))


def problem(n: int, k: int, seed: int, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=g) * torch.randn(k, generator=g).exp()
    return torch.randn(n, k, generator=g) * 0.05, x


def stats_of(x: torch.Tensor) -> LinearStats:
    normed = x / x.square().mean(1, keepdim=True).sqrt()
    return LinearStats(x.T @ x / len(x), normed.T @ normed / len(x), x.abs().amax(0), x.square().mean(0).sqrt(), len(x))


@examples(25)
@given(PROBLEM, st.booleans(), st.sampled_from([0, 8]))
def test_the_reported_error_is_that_of_the_stored_tensors(size: tuple[int, int, int], smooth: bool, rank: int) -> None:
    weight, x = problem(*size)
    recipe = Recipe(smooth={"strength": 0.5 if smooth else 0.0}, lowrank={"rank": rank})
    linear, report = quantize_layer(weight, None, stats_of(x), LinearSpec(rank=rank, smooth=smooth), recipe)
    left = weight.double() - linear.dequantize(torch.float64)
    found = float((x.double() @ left.T).square().sum() / (x.double() @ weight.double().T).square().sum())
    assert report.relative_error == pytest.approx(found, rel=2e-2, abs=1e-9)
    assert report.rounds[report.best_round] == min(report.rounds)


@examples(25)
@given(PROBLEM, st.integers(-8, 8))
def test_the_size_of_the_inputs_does_not_matter(size: tuple[int, int, int], power: int) -> None:
    """A Hessian times a power of two gives the same codes and scales."""
    weight, x = problem(*size)
    found = []
    for factor in (1.0, 4.0**power):
        upper = factorise((x.T @ x).double() * factor, 0.01).upper
        found.append(gptq(weight, upper, "search"))
    assert torch.equal(found[0].codes, found[1].codes)
    assert torch.equal(found[0].scales, found[1].scales)


@examples(25)
@given(PROBLEM, st.integers(-3, 3))
def test_the_size_of_the_weights_goes_into_the_scales(size: tuple[int, int, int], power: int) -> None:
    weight, x = problem(*size)
    weight = weight + weight.sign() * 0.02  # scales stay normal
    upper = factorise((x.T @ x).double(), 0.01).upper
    found, larger = gptq(weight, upper, "absmax"), gptq(weight * 2.0**power, upper, "absmax")
    assert torch.equal(larger.codes, found.codes)
    assert torch.equal(larger.scales, found.scales * 2.0**power)


@examples(25)
@given(PROBLEM, st.randoms(use_true_random=False))
def test_a_row_is_quantized_the_same_in_any_company(size: tuple[int, int, int], random: object) -> None:
    """Codes of a row depend on no other row, up to the rounding of a matrix product of another shape."""
    weight, x = problem(*size)
    order = list(range(len(weight)))
    random.shuffle(order)  # type: ignore[attr-defined]
    upper = factorise((x.T @ x).double(), 0.01).upper
    found, shuffled = gptq(weight, upper, "absmax"), gptq(weight[order], upper, "absmax")
    assert (shuffled.codes != found.codes[order]).float().mean() < 0.01
    torch.testing.assert_close(shuffled.scales.float(), found.scales[order].float(), rtol=0.02, atol=1e-4)


@examples(25)
@given(PROBLEM)
def test_gptq_beats_nothing_it_knows_of(size: tuple[int, int, int]) -> None:
    """With a Hessian the result is better on its inputs than the zero matrix, and perfect on a grid that holds it."""
    weight, x = problem(*size)
    hessian = x.T @ x / len(x)
    linear, report = quantize_layer(weight, None, stats_of(x), LinearSpec(rank=0), Recipe(lowrank={"rank": 0}))
    assert report.relative_error < 0.3
    recipe = Recipe(lowrank={"rank": 0}, rotation="none")
    grid = torch.randint(-7, 8, weight.shape, generator=torch.Generator().manual_seed(size[2])) * 0.125
    grid[:, ::64] = 7 * 0.125  # the absmax of each group, so that its scale is 1/8
    linear, report = quantize_layer(grid, None, stats_of(x), LinearSpec(rank=0, rotation="none"), recipe)
    assert torch.equal(linear.dequantize(), grid)
    assert report.relative_error == 0
    assert relative_error(grid * 0, grid, hessian) == 0
