"""Integer group scales: against scalar arithmetic, at the ends of FP32, and what widening keeps exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniw4 import int4
from omniw4.errors import OpError


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().double().item()


def naive(token: list[float], clip: float) -> tuple[list[int], list[int], float]:
    """One token in scalar arithmetic with every rounding spelled out: codes, group scales, token scale."""
    groups = [token[i : i + 64] for i in range(0, len(token), 64)]
    largest = [max(abs(v) for v in group) for group in groups]
    full = max(largest)
    if full == 0:
        return [0] * len(token), [0] * len(groups), 0.0
    scale = max(f32(full * f32(clip / 112)), 2.0**-100)
    codes, scales = [], []
    for group, absmax in zip(groups, largest, strict=True):
        s = min(max(round(f32(f32(absmax * f32(1 / scale)) * f32(clip / 7))), 1), 16)
        inverse = f32(1 / f32(scale * s))
        scales.append(s)
        codes += [min(max(round(f32(v * inverse)), -8), 7) for v in group]
    return codes, scales, scale


@pytest.mark.parametrize("clip", [1.0, 0.95])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e30, 1e-30, 1e-38])
def test_equals_scalar_arithmetic(size: float, clip: float) -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * size
    x[1, 64:128] *= 100  # the other groups of this token have the smallest scale
    x[2, 64:128] = 0
    x[3] = 0
    codes, scales, token = int4.quantize_groups_integer(x, clip)
    for row in range(8):
        wanted = naive(x[row].double().tolist(), clip)
        assert codes[row].tolist() == wanted[0], f"row {row}"
        assert scales[row].tolist() == wanted[1], f"row {row}"
        assert token[row].item() == wanted[2], f"row {row}"


def test_the_largest_group_has_sixteen_and_scales_follow_absmax() -> None:
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 64], x[0, 128] = 16.0, 8.0, 0.01
    codes, scales, token = int4.quantize_groups_integer(x)
    assert scales.tolist() == [[16, 8, 1, 1]]
    assert codes[0, [0, 64, 128, 192]].tolist() == [7, 7, 0, 0]
    assert token.item() == pytest.approx(1 / 7)


def test_every_code_and_scale_fits_int8() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(17, 4)
    scales = torch.arange(17, dtype=torch.uint8)[:, None]
    wide = int4.widen(codes, scales)
    assert wide.dtype == torch.int8
    assert torch.equal(wide.int(), codes.int() * scales.int())


def test_dequantize_is_the_formula_and_exact_in_fp64() -> None:
    x = torch.randn(5, 192)
    codes, scales, token = int4.quantize_groups_integer(x, 0.95)
    exact = int4.dequantize_integer(codes, scales, token, torch.float64)
    spread = scales.double().repeat_interleave(64, 1)
    assert torch.equal(exact, token.double() * spread * codes.double())
    assert torch.equal(int4.dequantize_integer(codes, scales, token), exact.float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_breaks_its_whole_token_and_no_other(bad: float) -> None:
    x = torch.randn(3, 192)
    clean = int4.quantize_groups_integer(x)
    x[1, 70] = bad
    codes, scales, token = int4.quantize_groups_integer(x)
    values = int4.dequantize_integer(codes, scales, token)
    assert not token[1].isfinite()
    assert values[1].isnan().all()
    for found, wanted in zip((codes, scales, token), clean, strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_nothing_but_zero_vanishes_whatever_the_size(values: list[float]) -> None:
    """Finite in, finite out; the largest value keeps a code unless it is below 2^-101."""
    x = torch.zeros(1, 256)
    x[0, ::64] = torch.tensor(values)
    codes, scales, token = int4.quantize_groups_integer(x)
    rebuilt = int4.dequantize_integer(codes, scales, token, torch.float64)
    largest = x.double().abs().max().item()
    assert rebuilt.isfinite().all()
    assert int(scales.max()) <= 16
    if largest > 2.0**-96:
        assert (rebuilt - x.double()).abs().max().item() <= largest / 14 * 1.001
    assert (token.item() == 0) == (largest == 0)


def test_groups_must_divide() -> None:
    with pytest.raises(OpError, match="group_size 64 does not divide"):
        int4.quantize_groups_integer(torch.zeros(3, 65))
