"""Scales of weight groups and rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import nearest, weights

from omniw4 import int4
from omniw4.quantize.scales import SHRINK_GRID, Float16Scales, round_to_grid


def test_absmax_is_the_rule_of_int4() -> None:
    w = weights(9, 256)
    codes, scales = nearest(w, torch.ones(256), "absmax")
    expected_codes, expected_scales = int4.quantize_groups(w)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


def test_round_to_grid_is_encode_and_dequantize_bit_for_bit() -> None:
    w = torch.cat([weights(7, 64), torch.zeros(1, 64), torch.full((1, 64), 3e-8), torch.full((1, 64), 7e4)])
    scales = int4.scale_from_absmax(w.abs().amax(1), 7, 0.8)
    codes = int4.encode(w, scales[:, None], -8, 7)
    assert torch.equal(round_to_grid(w.T.contiguous(), scales.float()), int4.dequantize(codes, scales[:, None]).T)


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
