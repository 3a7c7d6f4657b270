"""GPTQ in the order of the inputs' size: plain GPTQ between two permutations, and the storage does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantize_problems import inputs, naive_gptq, spec_of, stats_of, weights

from omniw4 import config, int4
from omniw4.config import Recipe
from omniw4.hadamard import hadamard64
from omniw4.quantize.gptq import factorise, gptq
from omniw4.quantize.layer import Linear, quantize_group, quantize_groups, quantize_layer
from omniw4.quantize.measure import relative_error
from omniw4.quantize.order import activation_order, columns_of, permute_hessian


def hessian_of(k: int, seed: int = 0) -> torch.Tensor:
    """``[K, K]`` float64 of whole numbers, whose sums are exact in any order."""
    x = inputs(400, k, seed).mul(8).round().double()
    return x.T @ x


def explicit(order: torch.Tensor) -> list[int]:
    """The columns of groups, spelled out."""
    return [group * 64 + i for group in order.tolist() for i in range(64)]


def back(order: torch.Tensor) -> list[int]:
    columns = explicit(order)
    return sorted(range(len(columns)), key=columns.__getitem__)


def test_the_largest_inputs_come_first_and_of_equal_ones_the_first() -> None:
    energies = torch.tensor([[2.0, 5.0, 2.0, 9.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]]).repeat_interleave(64, -1)
    assert activation_order(energies.diag_embed()).tolist() == [[3, 1, 0, 2, 4], [2, 0, 1, 3, 4]]
    assert activation_order(torch.zeros(192, 192)).tolist() == [0, 1, 2]


def test_a_rotation_within_the_groups_leaves_the_order() -> None:
    h = hessian_of(512)
    rotated = hadamard64(hadamard64(h).transpose(-1, -2))
    assert activation_order(h).tolist() != list(range(8))
    assert torch.equal(activation_order(rotated), activation_order(h))


def test_the_permuted_hessian_is_that_of_permuted_inputs() -> None:
    x = torch.stack([inputs(50, 256, seed) for seed in range(2)]).mul(8).round().double()
    h = x.transpose(1, 2) @ x
    order = torch.tensor([[2, 0, 3, 1], [1, 3, 2, 0]])
    found = permute_hessian(h, order)
    for b in range(2):
        moved = x[b][:, explicit(order[b])]
        assert columns_of(order)[b].tolist() == explicit(order[b])
        assert torch.equal(found[b], moved.T @ moved)


@pytest.mark.parametrize("block_size", [64, 128, 192])
@pytest.mark.parametrize("scale_type", ["float16", "integer"])
@pytest.mark.parametrize("rule", ["absmax", "search"])
def test_equals_plain_gptq_on_permuted_columns_bit_for_bit(rule: Any, scale_type: Any, block_size: int) -> None:
    w, h = weights(24, 320), hessian_of(320)
    order = activation_order(h)
    assert order.tolist() not in ([0, 1, 2, 3, 4], order.argsort().tolist()), "an order that tells there from back"
    factor = factorise(h, 0.125, order)
    moved = factorise(h[explicit(order)][:, explicit(order)].contiguous(), 0.125)
    assert factor.upper is not None
    assert moved.upper is not None
    assert torch.equal(factor.upper, moved.upper)
    found = gptq(w, factor.upper, rule, block_size, scale_type, order)
    wanted = gptq(w[:, explicit(order)].contiguous(), moved.upper, rule, block_size, scale_type)
    assert torch.equal(found.codes, wanted.codes[:, back(order)])
    assert torch.equal(found.scales, wanted.scales[:, order.argsort()])
    assert (found.rows is None) == (wanted.rows is None) == (scale_type == "float16")
    if found.rows is not None and wanted.rows is not None:
        assert torch.equal(found.rows, wanted.rows)
    assert found.codes.is_contiguous()
    assert found.scales.is_contiguous()
    natural = factorise(h, 0.125).upper
    assert natural is not None
    assert not torch.equal(found.codes, gptq(w, natural, rule, block_size, scale_type).codes)


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_the_natural_order_spelled_out_changes_nothing(scale_type: Any) -> None:
    w, h, order = weights(16, 192), hessian_of(192), torch.arange(3)
    natural, same = factorise(h, 0.01), factorise(h, 0.01, order)
    assert natural.upper is not None
    assert same.upper is not None
    assert torch.equal(natural.upper, same.upper)
    found, wanted = (gptq(w, natural.upper, "search", 128, scale_type, o) for o in (order, None))
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)


def test_equals_the_naive_loop_over_permuted_columns() -> None:
    w, h = weights(5, 192), hessian_of(192, seed=5)
    order = activation_order(h)
    assert order.tolist() != [0, 1, 2]
    upper = factorise(h, 0.01, order).upper
    assert upper is not None
    found = gptq(w, upper, "absmax", order=order)
    codes, scales = naive_gptq(w[:, explicit(order)], h[explicit(order)][:, explicit(order)], 0.01)
    assert (found.codes != codes[:, back(order)]).float().mean() < 0.01
    torch.testing.assert_close(found.scales.float(), scales[:, order.argsort()].float(), rtol=0.02, atol=0)


def test_each_of_a_batch_has_its_own_order() -> None:
    w = torch.stack([weights(6, 256, seed=s) for s in range(3)])
    h = torch.stack([hessian_of(256, seed=s) for s in range(3)])
    order = activation_order(h)
    assert len({tuple(one) for one in order.tolist()}) == 3
    upper = factorise(h, 0.01, order).upper
    assert upper is not None
    together = gptq(w, upper, "search", scale_type="integer", order=order)
    for b in range(3):
        one = factorise(h[b], 0.01, order[b]).upper
        assert one is not None
        alone = gptq(w[b], one, "search", scale_type="integer", order=order[b])
        assert (together.codes[b] != alone.codes).float().mean() < 0.01, f"batch {b}"
        assert (together.scales[b] != alone.scales).float().mean() < 0.05, f"batch {b}"


def test_it_helps_where_the_largest_inputs_lie_last() -> None:
    x = inputs(1500, 320, seed=3) * torch.linspace(-2, 2, 5).exp().repeat_interleave(64)
    w, h = weights(96, 320), (x.T @ x / len(x)).double()
    errors = []
    for order in (None, activation_order(h)):
        upper = factorise(h, 0.01, order).upper
        assert upper is not None
        errors.append(relative_error(w - gptq(w, upper, "search", order=order).dequantize(), w, h.float()))
    assert errors[1] < 0.9 * errors[0]


def recipe_with(**changes: Any) -> Recipe:
    gptq_section = {"order": "activation", **changes.pop("gptq", {})}
    return config.load("default", {"recipe": {"gptq": gptq_section, **changes}}).recipe


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gptq": {"sweeps": 0}},
        {"lowrank": {"whiten": "full"}},
        {"lowrank": {"whiten": "diagonal"}},
        {"rotation": "none"},
    ],
    ids=["default", "no sweeps", "whitened in full", "whitened by the diagonal", "no rotation"],
)
def test_what_is_reported_is_what_is_stored(changes: dict[str, Any]) -> None:
    recipe, x, w = recipe_with(**changes), inputs(600, 256), weights(64, 256)
    quantized, report = quantize_layer(w, None, stats_of(x), spec_of(recipe), recipe)
    wanted = x.double() @ w.double().T
    left = wanted - x.double() @ quantized.dequantize(torch.float64).T
    assert report.relative_error == pytest.approx(float(left.square().sum() / wanted.square().sum()), rel=1e-3)
    assert report.relative_error < report.rtn_error


def test_a_branch_whitened_in_full_is_the_same_in_either_order() -> None:
    """Any root of H gives the optimum; nearest codes do not depend on the order."""
    x, w = inputs(600, 256), weights(64, 256)
    found = []
    for order in ("natural", "activation"):
        recipe = recipe_with(gptq={"enabled": False, "order": order}, lowrank={"whiten": "full"})
        found.append(quantize_layer(w, None, stats_of(x), spec_of(recipe), recipe)[1].relative_error)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_linears_of_one_input_share_the_order_and_batches_equal_one_by_one() -> None:
    recipe = recipe_with()
    groups, stats = [], []
    for seed in range(3):
        shapes = ((96, "q"), (32, "k"))
        groups.append([Linear(f"{seed}.{c}", weights(n, 192, seed=seed), None, spec_of(recipe)) for n, c in shapes])
        stats.append(stats_of(inputs(400, 192, seed=seed)))
    together = quantize_groups(groups, stats, recipe)
    for group, known, results in zip(groups, stats, together, strict=True):
        for (quantized, report), (alone, told) in zip(results, quantize_group(group, known, recipe), strict=True):
            codes, wanted = int4.unpack_nibbles(quantized.qweight), int4.unpack_nibbles(alone.qweight)
            assert (codes != wanted).float().mean() < 0.05
            assert report.relative_error == pytest.approx(told.relative_error, rel=0.02)
