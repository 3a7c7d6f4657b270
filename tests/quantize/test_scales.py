"""Scales of weight groups and rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import nearest, weights

from omniw4 import int4
from omniw4.quantize.scales import SHRINK_GRID, Float16Scales, IntegerScales, round_to_nearest


def test_absmax_is_the_rule_of_int4() -> None:
    w = weights(9, 256)
    codes, scales = nearest(w, torch.ones(256), "absmax")
    expected_codes, expected_scales = int4.quantize_groups(w)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


def round_to_grid(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The nearest representable values: ``[..., G, N]`` with steps ``[..., N]``."""
    codes = int4.encode(values, step[..., None, :], -8, 7)
    return codes * step[..., None, :].float()


@pytest.mark.parametrize("lead", [(), (3,)])
def test_search_finds_the_least_weighted_error_of_the_grid(lead: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    group = torch.randn(*lead, 64, 11, generator=g)
    importance = torch.rand(*lead, 64, generator=g)
    chosen = Float16Scales("search").choose(group, importance)

    def error(scales: torch.Tensor) -> torch.Tensor:
        e = group.double() - round_to_grid(group, scales.float()).double()
        return (e.square() * importance.double()[..., None]).sum(-2)

    absmax = group.abs().amax(-2)
    candidates = torch.stack([error(int4.scale_from_absmax(absmax, 7, shrink)) for shrink in SHRINK_GRID])
    torch.testing.assert_close(error(chosen), candidates.amin(0), rtol=1e-4, atol=0)
    assert (error(chosen) < candidates[0]).float().mean() > 0.5


def test_search_is_never_worse_than_absmax() -> None:
    w = weights(64, 256)
    absmax = (w - int4.dequantize(*nearest(w, torch.ones(256), "absmax"))).square()
    search = (w - int4.dequantize(*nearest(w, torch.ones(256), "search"))).square()
    assert (int4.split_groups(search).sum(-1) <= int4.split_groups(absmax).sum(-1) * 1.0001).all()


@pytest.mark.parametrize("rule", ["absmax", "search"])
def test_zero_tiny_constant_and_huge_groups(rule: str) -> None:
    w = torch.zeros(6, 64)
    w[1] = 1e-9  # absmax/7 underflows FP16
    w[2] = 0.25  # constant
    w[3] = -0.25
    w[4, 10] = 1.0  # one value
    w[5] = 6e4
    codes, scales = nearest(w, torch.ones(64), rule)  # type: ignore[arg-type]
    assert torch.isfinite(scales).all()
    assert scales[0] == 0
    assert not codes[0].any()
    assert scales[1] == int4.SCALE_MIN
    rebuilt = int4.dequantize(codes, scales)
    torch.testing.assert_close(rebuilt[2:], w[2:], rtol=2e-3, atol=1e-4)


def test_importance_of_zero_everywhere_still_gives_a_usable_scale() -> None:
    w = weights(4, 64)
    _, scales = nearest(w, torch.zeros(64), "search")
    assert torch.equal(scales, int4.quantize_groups(w)[1])


def naive_integer(group: torch.Tensor, importance: torch.Tensor, row: float) -> tuple[int, float]:
    """The best of all m in 1..16 for one group of one row, and its weighted error, in FP64."""
    errors = []
    for m in range(1, 17):
        rounded = (group.double() / (row * m)).round().clamp(-8, 7) * row * m
        errors.append(float((importance.double() * (group.double() - rounded).square()).sum()))
    best = min(range(16), key=errors.__getitem__)
    return best + 1, errors[best]


def test_integer_search_is_as_good_as_all_sixteen() -> None:
    """It looks at seven of them: where another one is best, it is best by little."""
    g = torch.Generator().manual_seed(3)
    group, importance = torch.randn(64, 40, generator=g), torch.rand(64, generator=g)
    rows = torch.linspace(0.02, 0.06, 40)
    kind = IntegerScales("search", rows)
    chosen = kind.choose(group, importance)
    assert chosen.dtype == torch.uint8
    rounded = round_to_grid(group, kind.step(chosen))
    errors = ((group - rounded).double().square() * importance.double()[:, None]).sum(0)
    same = 0
    for n in range(40):
        m, least = naive_integer(group[:, n], importance, float(rows[n]))
        assert errors[n] <= least * 1.02, f"row {n}: m {int(chosen[n])}, best {m}"
        same += int(chosen[n]) == m
    assert same >= 38


def test_integer_absmax_is_the_smallest_grid_that_spans_the_group() -> None:
    group = torch.zeros(64, 4)
    group[0] = torch.tensor([0.7, 0.71, 100.0, 0.0])
    chosen = IntegerScales("absmax", torch.full((4,), 0.01)).choose(group, torch.ones(64))
    assert chosen.tolist() == [10, 11, 16, 0]


@pytest.mark.parametrize("rule", ["absmax", "search"])
def test_row_scales_make_the_largest_group_sixteen(rule: str) -> None:
    w = weights(12, 256)
    w[:, 64:128] *= 3
    w[5] = 0
    rounded = round_to_nearest(w, torch.ones(256), rule, "integer")  # type: ignore[arg-type]
    assert rounded.rows is not None
    others = [n for n in range(12) if n != 5]
    assert (rounded.scales[others].amax(1) >= 15).all()
    assert (rounded.rows[5], rounded.scales[5].amax(), rounded.codes[5].abs().amax()) == (0, 0, 0)
    assert (rounded.rows[others] > 0).all()


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6])
def test_integer_scales_do_not_depend_on_the_size_of_the_weights(size: float) -> None:
    """FP16 scales end at 2^-14; the rows' FP32 scales take what the size asks for."""
    w = weights(6, 128)
    reference = round_to_nearest(w, torch.ones(128), "search", "integer")
    scaled = round_to_nearest(w * size, torch.ones(128), "search", "integer")
    assert reference.rows is not None
    assert scaled.rows is not None
    assert (reference.codes != scaled.codes).float().mean() < 0.01
    torch.testing.assert_close(scaled.rows.double() / size, reference.rows.double(), rtol=0.03, atol=0)


def test_integer_scales_cost_little() -> None:
    w = weights(64, 512)
    errors = [
        float((w - round_to_nearest(w, torch.ones(512), "search", kind).dequantize()).square().sum())  # type: ignore[arg-type]
        for kind in ("float16", "integer")
    ]
    assert errors[1] < 1.05 * errors[0]
