"""One linear from weights to stored tensors: the loop, its report, and weights and statistics that are hard."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantize_problems import inputs, spec_of, stats_of, weights

from omniw4 import config, int4
from omniw4.config import Recipe
from omniw4.errors import NonFiniteError, StatsError
from omniw4.quantize.layer import Linear, quantize_group, quantize_groups, quantize_layer
from omniw4.quantize.lowrank import svd_lowrank
from omniw4.tensors import LayerReport, LinearStats, QuantizedLinear

RECIPES = ["seed", "default", "rtn"]


def recipe_of(name: str, **lowrank: Any) -> Recipe:
    return config.load(name, {"recipe": {"lowrank": lowrank}}).recipe


def run(
    weight: torch.Tensor, recipe: Recipe, x: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> tuple[QuantizedLinear, LayerReport]:
    return quantize_layer(weight, bias, None if x is None else stats_of(x), spec_of(recipe), recipe, path="a.proj")


def output_error(x: torch.Tensor, weight: torch.Tensor, quantized: QuantizedLinear) -> float:
    """``‖X(W-Ŵ)ᵀ‖² / ‖XWᵀ‖²`` in FP64, from what is stored."""
    x, weight = x.double(), weight.double()
    wanted = x @ weight.T
    return float((wanted - x @ quantized.dequantize(torch.float64).T).square().sum() / wanted.square().sum())


@pytest.mark.parametrize("name", ["seed", "default"])
def test_the_report_tells_the_output_error_of_what_is_stored(name: str) -> None:
    x, w = inputs(500, 192), weights(96, 192)
    quantized, report = run(w, recipe_of(name), x)
    assert report.method == "gptq"
    assert report.relative_error == pytest.approx(output_error(x, w, quantized), rel=1e-3)
    assert report.sqnr_db == pytest.approx(-10 * math.log10(report.relative_error))
    assert report.damp == recipe_of(name).gptq.damp
    assert 0 < report.rank_energy < 1


def test_without_statistics_the_error_is_that_of_the_weights() -> None:
    w = weights(96, 192)
    quantized, report = run(w, recipe_of("rtn"))
    error = float((w - quantized.dequantize()).square().sum() / w.square().sum())
    assert report.method == "rtn"
    assert report.relative_error == pytest.approx(error, rel=1e-3)
    assert report.rtn_error == report.relative_error


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_have_the_shapes_and_dtypes_of_the_checkpoint(name: str) -> None:
    recipe = recipe_of(name)
    for dtype, stored in ((torch.float32, torch.float16), (torch.float16,) * 2, (torch.bfloat16,) * 2):
        w, bias = weights(40, 128).to(dtype), torch.randn(40).to(dtype)
        quantized, _ = run(w, recipe, inputs(200, 128), bias)
        wanted = {
            "qweight": ((40, 64), torch.uint8),
            "w_scales": ((40, 2), torch.float16),
            "proj_down": ((128, 16), stored),
            "proj_up": ((40, 16), stored),
            "bias": ((40,), stored),
        }
        if recipe.smooth.enabled:
            wanted["smooth"] = ((128,), stored)
        assert {n: (tuple(t.shape), t.dtype) for n, t in quantized.tensors().items()} == wanted
        assert all(t.is_contiguous() for t in quantized.tensors().values())
        assert quantized.bias is not None
        assert torch.equal(quantized.bias, bias.to(stored))


def test_the_seed_recipe_is_gptq_and_svd_in_turn() -> None:
    """The first round against its definition: Q = GPTQ(W), L = SVD_r(W - Q)."""
    x, w = inputs(500, 128), weights(64, 128)
    alone, _ = run(w, recipe_of("seed", rank=0), x)
    first, report = run(w, recipe_of("seed", rounds=1), x)
    assert torch.equal(first.qweight, alone.qweight)
    assert torch.equal(first.w_scales, alone.w_scales)
    residual = w - alone.dequantize()
    assert first.proj_up is not None
    assert first.proj_down is not None
    left = float((residual - first.proj_up.float() @ first.proj_down.float().T).square().sum())
    assert left == pytest.approx(float(torch.linalg.svdvals(residual)[16:].square().sum()), rel=1e-3)
    share = 1 - left / float(residual.square().sum())
    assert report.rank_energy == pytest.approx(share, abs=1e-3)


def test_svd_of_w_first_is_gptq_of_what_it_leaves() -> None:
    """The first round against its definition: L₀ = SVD_r(W), Q = GPTQ(W - L₀), L = SVD_r(W - Q)."""
    x, w = inputs(500, 128), weights(64, 128) + weights(64, 4, seed=8) @ weights(4, 128, seed=9, std=1.0)
    left = w - svd_lowrank(w, 16, torch.float16).product()
    alone, _ = run(left, recipe_of("seed", rank=0), x)
    first, report = run(w, recipe_of("seed", init="svd_weight", rounds=1), x)
    assert torch.equal(first.qweight, alone.qweight)
    assert torch.equal(first.w_scales, alone.w_scales)
    again = svd_lowrank(w - alone.dequantize(), 16, torch.float16)
    assert first.proj_up is not None
    assert first.proj_down is not None
    torch.testing.assert_close(first.proj_up.float() @ first.proj_down.float().T, again.product(), rtol=0, atol=1e-3)
    assert report.relative_error < run(w, recipe_of("seed", rounds=1), x)[1].relative_error


@pytest.mark.parametrize("hessian", ["plain", "normalized"])
def test_codes_follow_the_recipe_s_hessian_and_the_report_the_plain_one(hessian: str) -> None:
    """Some loud tokens: under the normalised Hessian they weigh what the others weigh."""
    x, w = inputs(500, 128), weights(64, 128)
    x[::50] = 40 * inputs(10, 128, seed=9)
    stats = stats_of(x)
    same = replace(stats, hessian=stats.hessian_normalized) if hessian == "normalized" else stats
    recipes = [config.load("default", {"recipe": {"gptq": {"hessian": kind}}}).recipe for kind in (hessian, "plain")]
    mine, report = quantize_layer(w, None, stats, spec_of(recipes[0]), recipes[0])
    twin, _ = quantize_layer(w, None, same, spec_of(recipes[1]), recipes[1])
    for name, tensor in twin.tensors().items():
        assert torch.equal(tensor, mine.tensors()[name]), name
    assert report.relative_error == pytest.approx(output_error(x, w, mine), rel=1e-3)
    normed = x / x.square().mean(1, keepdim=True).sqrt()
    other = {"plain": "normalized", "normalized": "plain"}[hessian]
    recipe = config.load("default", {"recipe": {"gptq": {"hessian": other}}}).recipe
    rival, _ = quantize_layer(w, None, stats, spec_of(recipe), recipe)
    judged_by = normed if hessian == "normalized" else x
    assert output_error(judged_by, w, mine) < output_error(judged_by, w, rival)


@pytest.mark.parametrize("name", ["seed", "default"])
def test_the_best_round_is_kept_and_rounds_end_when_the_error_rises(name: str) -> None:
    x, w = inputs(500, 192), weights(96, 192)
    _, report = run(w, recipe_of(name, rounds=12), x)
    errors = report.rounds
    assert report.best_round == min(range(len(errors)), key=errors.__getitem__)
    falls = [after < before for before, after in itertools.pairwise(errors)]
    assert all(falls[:-1]), errors
    assert len(errors) > 1
    for rounds in (1, len(errors)):
        _, fewer = run(w, recipe_of(name, rounds=rounds), x)
        assert fewer.rounds == errors[:rounds]


@pytest.mark.parametrize("rank", [0, 1, 16, 96, 128, 256])
def test_any_rank(rank: int) -> None:
    x, w = inputs(300, 128), weights(64, 128)
    quantized, report = run(w, recipe_of("default", rank=rank), x)
    assert report.relative_error == pytest.approx(output_error(x, w, quantized), rel=1e-2, abs=1e-6)
    if rank == 0:
        assert quantized.proj_up is None
        assert quantized.proj_down is None
        assert report.rank_energy == 0
        assert len(report.rounds) == 1
    else:
        assert quantized.proj_up is not None
        assert quantized.proj_up.shape == (64, rank)


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_input_gives_the_same_bytes(name: str) -> None:
    x, w = inputs(300, 128), weights(64, 128)
    first, second = run(w, recipe_of(name), x)[0], run(w, recipe_of(name), x)[0]
    for tensor_name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[tensor_name]), tensor_name


def test_non_contiguous_weights_are_the_same_weights() -> None:
    x, w = inputs(300, 128), weights(64, 128)
    wide = torch.zeros(64, 256)
    wide[:, ::2] = w
    first, second = run(w, recipe_of("default"), x)[0], run(wide[:, ::2], recipe_of("default"), x)[0]
    assert torch.equal(first.qweight, second.qweight)


def test_the_tuned_recipe_beats_the_data_free_one_and_the_report_shows_both() -> None:
    x, w = inputs(600, 192), weights(96, 192)
    _, tuned = run(w, recipe_of("default"), x)
    free, _ = run(w, recipe_of("rtn"))
    assert tuned.rtn_error == pytest.approx(output_error(x, w, free), rel=0.05)
    assert tuned.relative_error < tuned.rtn_error
    assert tuned.warnings == []


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["zero", "constant", "zero_rows", "zero_columns", "tiny", "huge", "one_value"])
def test_degenerate_weights(name: str, kind: str) -> None:
    x, w = inputs(300, 128), weights(32, 128)
    if kind == "zero":
        w = torch.zeros(32, 128)
    elif kind == "constant":
        w = torch.full((32, 128), 0.1)
    elif kind == "zero_rows":
        w[[0, 7, 31]] = 0
    elif kind == "zero_columns":
        w[:, [0, 64, 127]] = 0
    elif kind == "tiny":
        w = w * 1e-3
    elif kind == "huge":
        w = w * 1e5
    else:
        w = torch.zeros(32, 128)
        w[3, 5] = 1.0
    quantized, report = run(w, recipe_of(name), x)
    rebuilt = quantized.dequantize()
    assert torch.isfinite(rebuilt).all()
    assert torch.isfinite(quantized.w_scales).all()
    assert report.relative_error < 0.05
    if kind == "zero":
        assert report.relative_error == 0
        assert report.sqnr_db == math.inf
    if kind == "zero_rows":
        assert rebuilt[[0, 7, 31]].abs().max() < 1e-2 * w.abs().max()


@pytest.mark.parametrize("name", ["seed", "default"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_fewer_tokens_than_channels_is_a_warning(name: str, tokens: int) -> None:
    x, w = inputs(tokens, 128), weights(32, 128)
    quantized, report = run(w, recipe_of(name), x)
    assert torch.isfinite(quantized.dequantize()).all()
    assert report.method == "gptq"
    assert any(f"{tokens} calibration tokens" in warning for warning in report.warnings)


def test_dead_channels_keep_their_weights() -> None:
    x, w = inputs(300, 128), weights(32, 128)
    x[:, [0, 64]] = 0
    quantized, _ = run(w, recipe_of("seed", rank=0), x)
    dead = quantized.dequantize()[:, [0, 64]]
    assert (dead - w[:, [0, 64]]).abs().max() <= quantized.w_scales.float().max()
    assert dead.any()


def broken(kind: str) -> LinearStats:
    stats = stats_of(inputs(300, 128))
    if kind == "indefinite":
        stats.hessian[0, 1] = stats.hessian[1, 0] = 1e6
        stats.hessian_normalized[0, 1] = stats.hessian_normalized[1, 0] = 1e6
    else:
        stats.hessian.zero_()
        stats.hessian_normalized.zero_()
    return stats


@pytest.mark.parametrize("name", ["seed", "default"])
@pytest.mark.parametrize("kind", ["indefinite", "zero"])
def test_a_hopeless_hessian_falls_back_to_nearest_and_says_so(name: str, kind: str) -> None:
    w, recipe = weights(32, 128), recipe_of(name)
    quantized, report = quantize_layer(w, None, broken(kind), spec_of(recipe), recipe, path="a.proj")
    assert report.method == "rtn-fallback"
    assert any("positive definite" in text or "zero" in text for text in report.warnings)
    assert torch.isfinite(quantized.dequantize()).all()
    assert (quantized.dequantize() - w).abs().max() < 0.2 * w.abs().max()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_weights_that_are_not_finite_are_named(bad: float, where: str) -> None:
    w, bias = weights(32, 128), torch.zeros(32)
    (w[3] if where == "weight" else bias)[5] = bad
    with pytest.raises(NonFiniteError, match=rf"a\.proj\.{where} holds 1 ") as caught:
        run(w, recipe_of("rtn"), None, bias)
    assert "--skip 'a.proj'" in caught.value.hint


def test_statistics_that_are_not_finite_missing_or_of_another_width_are_named() -> None:
    w, recipe = weights(32, 128), recipe_of("default")
    with pytest.raises(StatsError, match=r"a\.proj"):
        run(w, recipe)
    with pytest.raises(StatsError, match="192 input features, the linear has 128"):
        run(w, recipe, inputs(300, 192))
    stats = stats_of(inputs(300, 128))
    stats.hessian[4, 4] = math.nan
    with pytest.raises(NonFiniteError, match=r"hessian of a\.proj"):
        quantize_layer(w, None, stats, spec_of(recipe), recipe, path="a.proj")


@pytest.mark.parametrize("name", ["seed", "default"])
def test_linears_of_one_input_together_are_as_good_as_alone(name: str) -> None:
    """Without smoothing, which they share, they are the same problem."""
    x, recipe = inputs(500, 128), config.load(name, {"recipe": {"smooth": {"strength": 0.0}}}).recipe
    ws = [weights(n, 128, seed=n) for n in (64, 16, 24)]
    group = [Linear(f"a.{i}", w, None, spec_of(recipe)) for i, w in enumerate(ws)]
    together = quantize_group(group, stats_of(x), recipe)
    for w, (quantized, report) in zip(ws, together, strict=True):
        alone, alone_report = run(w, recipe, x)
        assert (int4.unpack_nibbles(alone.qweight) != int4.unpack_nibbles(quantized.qweight)).float().mean() < 0.02
        assert report.relative_error == pytest.approx(alone_report.relative_error, rel=0.02)


def test_ranks_may_differ_within_a_group() -> None:
    recipe = recipe_of("default")
    base = spec_of(recipe)
    specs = [type(base)(**{**base.to_dict(), "rank": rank}) for rank in (0, 8, 32)]
    group = [Linear(f"a.{s.rank}", weights(32, 128, seed=s.rank), None, s) for s in specs]
    results = quantize_group(group, stats_of(inputs(300, 128)), recipe)
    shapes = [None if q.proj_up is None else tuple(q.proj_up.shape) for q, _ in results]
    assert shapes == [None, (32, 8), (32, 32)]


@pytest.mark.parametrize("name", ["seed", "default"])
@pytest.mark.parametrize("measure", ["absmax", "rms"])
def test_smoothing_is_one_vector_for_a_group_and_undone_by_the_weights(name: str, measure: str) -> None:
    recipe = config.load(name, {"recipe": {"smooth": {"strength": 0.5, "measure": measure}}}).recipe
    x, ws = inputs(500, 128), [weights(32, 128, seed=s) for s in range(2)]
    results = quantize_group(
        [Linear(f"a.{i}", w, None, spec_of(recipe)) for i, w in enumerate(ws)], stats_of(x), recipe
    )
    first, second = (q.smooth for q, _ in results)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    for w, (quantized, report) in zip(ws, results, strict=True):
        assert output_error(x, w, quantized) < 0.02
        assert report.relative_error == pytest.approx(output_error(x, w, quantized), rel=1e-2)


@pytest.mark.parametrize("name", RECIPES)
def test_groups_at_once_give_what_each_gives_alone(name: str) -> None:
    """Each with rounds, branch and best iterate of its own; only the rounding of batched products may differ."""
    recipe = recipe_of(name, rounds=4)
    groups, stats = [], []
    for seed in range(3):
        shapes = ((96, "q"), (32, "k"))
        groups.append([Linear(f"{seed}.{c}", weights(n, 128, seed=seed), None, spec_of(recipe)) for n, c in shapes])
        stats.append(None if name == "rtn" else stats_of(inputs(300, 128, seed=seed)))
    together = quantize_groups(groups, stats, recipe)
    assert [[r.path for _, r in results] for results in together] == [["0.q", "0.k"], ["1.q", "1.k"], ["2.q", "2.k"]]
    for group, known, results in zip(groups, stats, together, strict=True):
        for (quantized, report), (alone, told) in zip(results, quantize_group(group, known, recipe), strict=True):
            assert report.method == told.method
            assert len(report.rounds) == len(told.rounds)
            assert report.relative_error == pytest.approx(told.relative_error, rel=0.02)
            assert report.rtn_error == pytest.approx(told.rtn_error, rel=0.02)
            assert (quantized.qweight != alone.qweight).float().mean() < 0.05
            assert {n: t.shape for n, t in quantized.tensors().items()} == {
                n: t.shape for n, t in alone.tensors().items()
            }


def test_a_group_that_needs_more_damping_does_not_change_its_neighbours() -> None:
    recipe = recipe_of("seed")
    sound, broken = stats_of(inputs(300, 128)), stats_of(inputs(300, 128))
    broken.hessian = broken.hessian - 0.2 * broken.hessian.diagonal().mean() * torch.eye(128)
    groups = [[Linear(name, weights(64, 128), None, spec_of(recipe))] for name in ("sound", "broken")]
    (beside, _), (_, report) = (results[0] for results in quantize_groups(groups, [sound, broken], recipe))
    (alone, _) = quantize_group(groups[0], sound, recipe)[0]
    assert report.damp > recipe.gptq.damp
    assert any("not positive definite" in text for text in report.warnings)
    for tensor_name, tensor in alone.tensors().items():
        assert torch.equal(beside.tensors()[tensor_name], tensor), tensor_name


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_whitened_branch_lowers_the_output_error(kind: str) -> None:
    """Of the same codes: nearest ones, to which the branch is fitted once."""
    gptq = {"enabled": False, "hessian": "plain", "damp": 1e-4}
    recipe = {"gptq": gptq, "lowrank": {"init": "zero", "rounds": 1}, "rotation": "none", "smooth": {"strength": 0.0}}
    x, w = inputs(2000, 192), weights(128, 192)
    plain, whitened = (
        config.load("default", {"recipe": {**recipe, "lowrank": {**recipe["lowrank"], "whiten": whiten}}}).recipe
        for whiten in ("none", kind)
    )
    assert torch.equal(run(w, plain, x)[0].qweight, run(w, whitened, x)[0].qweight)
    assert run(w, whitened, x)[1].relative_error < 0.9 * run(w, plain, x)[1].relative_error
    assert whitened.needs_stats


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_whitening_by_inputs_that_are_all_zero_is_no_whitening(kind: str) -> None:
    recipe = recipe_of("default", whiten=kind)
    quantized, _ = run(weights(64, 64), recipe, torch.zeros(99, 64))
    assert quantized.proj_down is not None
    assert bool(quantized.proj_down.isfinite().all())
    assert bool(quantized.proj_down.any())
