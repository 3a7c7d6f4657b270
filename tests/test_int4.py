"""The integer semantics: every byte, every tie, and the ends of the FP16 range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniw4 import int4
from omniw4.errors import OpError

HALF_MAX = 65504.0
HALF_TINY = 2.0**-24  # smallest subnormal FP16
HALF_NORMAL = 2.0**-14


def group(*values: float) -> torch.Tensor:
    """One group of 64 that starts with the values; the rest is zero."""
    x = torch.zeros(64)
    x[: len(values)] = torch.tensor(values)
    return x


def test_unpack_every_byte_by_the_definition() -> None:
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = int4.unpack_nibbles(packed)
    for byte, (low, high) in enumerate(codes.tolist()):
        assert low == (byte & 15) - 16 * ((byte & 15) > 7), byte
        assert high == (byte >> 4) - 16 * ((byte >> 4) > 7), byte
    assert torch.equal(int4.pack_nibbles(codes), packed)


def test_pack_every_pair_of_codes() -> None:
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    packed = int4.pack_nibbles(codes)
    assert packed.shape == (256, 1)
    assert packed.unique().numel() == 256
    assert torch.equal(int4.unpack_nibbles(packed), codes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float32])
def test_pack_takes_codes_of_any_dtype(dtype: torch.dtype) -> None:
    codes = torch.tensor([[0, 7, 1, 2]])
    assert int4.pack_nibbles(codes.to(dtype)).tolist() == [[0x70, 0x21]]


def test_pack_strided_and_empty() -> None:
    codes = torch.randint(-8, 8, (6, 10), dtype=torch.int8)
    assert torch.equal(int4.pack_nibbles(codes.T), int4.pack_nibbles(codes.T.contiguous()))
    assert int4.pack_nibbles(codes[:0]).shape == (0, 5)


def test_pack_refuses_an_odd_width() -> None:
    with pytest.raises(OpError, match=r"even last dimension, found \(2, 7\)"):
        int4.pack_nibbles(torch.zeros(2, 7, dtype=torch.int8))


@pytest.mark.parametrize("width", [1, 63, 65, 100])
def test_group_must_divide(width: int) -> None:
    with pytest.raises(OpError, match="group_size 64 does not divide"):
        int4.quantize_groups(torch.zeros(3, width))


def test_ties_round_to_even() -> None:
    # absmax 7 gives scale 1 exactly, so that the halves are ties
    values = (7.0, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5, 6.5)
    codes, scales = int4.quantize_groups(group(*values))
    assert scales.tolist() == [1.0]
    assert codes[: len(values)].tolist() == [7, 0, 2, 2, 4, 0, -2, -2, -4, 6]


def test_a_clipped_grid_reaches_minus_eight() -> None:
    codes, _ = int4.quantize_groups(group(7.0, -7.0, 1.0), clip=0.5)
    assert codes[:3].tolist() == [7, -8, 2]


def test_zero_group_is_exactly_zero() -> None:
    x = torch.stack((group(), group(1.0)))
    codes, scales = int4.quantize_groups(x)
    assert scales[0].item() == 0
    assert not codes[0].any()
    assert not int4.dequantize(codes, scales)[0].any()
    assert int4.dequantize(codes, scales)[1, 0] > 0


def test_negative_zero_is_zero() -> None:
    codes, scales = int4.quantize_groups(torch.full((64,), -0.0))
    assert scales.item() == 0
    assert not codes.any()


@pytest.mark.parametrize("value", [HALF_TINY, 2.0**-126, 2.0**-149, HALF_NORMAL])
def test_a_small_group_keeps_a_normal_scale(value: float) -> None:
    """A non-zero group never gets scale 0, nor a subnormal one whose reciprocal would overflow."""
    codes, scales = int4.quantize_groups(group(value, -value))
    assert scales.item() == HALF_NORMAL
    assert torch.isfinite(int4.dequantize(codes, scales)).all()


@pytest.mark.parametrize(("value", "scale"), [(HALF_MAX, HALF_MAX / 7), (1e38, HALF_MAX)])
def test_a_large_group_keeps_a_finite_scale(value: float, scale: float) -> None:
    codes, scales = int4.quantize_groups(group(value, -value / 2))
    assert scales.item() == pytest.approx(scale, rel=2**-11)
    assert codes[0].item() == 7
    assert torch.isfinite(int4.dequantize(codes, scales)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_a_non_finite_value_is_visibly_broken(bad: float) -> None:
    """NaN out, never plausible numbers; the neighbouring group does not notice."""
    codes, scales = int4.quantize_groups(torch.cat((group(bad, 1.0), group(1.0, -1.0))))
    assert not torch.isfinite(scales[0])
    values = int4.dequantize(codes, scales)
    assert not torch.isfinite(values[:64]).any()
    assert torch.isfinite(values[64:]).all()
    assert codes[64:66].tolist() == [7, -7]


@pytest.mark.parametrize(("absmax", "qmax", "clip"), [(3.0, 7, 1.0), (3.0, 127, 1.0), (3.0, 7, 0.95), (0.1, 7, 0.3)])
def test_scale_is_one_product_rounded_to_half(absmax: float, qmax: int, clip: float) -> None:
    factor = torch.tensor(clip / qmax, dtype=torch.float32)
    wanted = (torch.tensor(absmax) * factor).half()
    assert torch.equal(int4.scale_from_absmax(torch.tensor(absmax), qmax, clip), wanted)


def test_tokens_have_one_scale_a_row() -> None:
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    codes, scales = int4.quantize_tokens(x)
    assert scales.shape == (5, 1)
    assert scales[2].item() == 0
    assert not codes[2].any()
    error = (int4.dequantize(codes, scales) - x).abs()
    # half a step, plus what rounding the scale to FP16 adds at the end of the grid
    assert (error <= scales.float() * 0.5 + x.abs() * 2**-10).all()


def test_dequantize_is_exact_in_float64() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4)
    scale = torch.tensor([0.1]).half()
    wanted = codes.double() * float(scale)
    assert torch.equal(int4.dequantize(codes, scale, torch.float64), wanted)
    assert torch.equal(int4.dequantize(codes, scale).double(), wanted)


finite = st.floats(min_value=-60000, max_value=60000, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(finite, min_size=64, max_size=64), st.sampled_from([1.0, 0.95, 0.5]))
def test_quantize_properties(values: list[float], clip: float) -> None:
    x = torch.tensor(values)
    codes, scales = int4.quantize_groups(x, clip)
    assert codes.min() >= -8
    assert codes.max() <= 7
    assert torch.isfinite(scales).all()
    assert (scales == 0).item() == (not x.any())
    # an odd function but for the asymmetric end: -8 has no positive counterpart
    mirrored, same = int4.quantize_groups(-x, clip)
    assert torch.equal(scales, same)
    assert torch.equal(mirrored, (-codes).clamp(-8, 7)) or clip < 1
    # values inside the grid are at most half a step away (and one rounding of the reciprocal)
    inside = x.abs() <= 7 * scales.float()
    error = (int4.dequantize(codes, scales) - x).abs()
    assert (error[inside] <= scales.float() * 0.5 * (1 + 2**-20)).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31))
def test_pack_round_trip(rows: int, pairs: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert torch.equal(int4.unpack_nibbles(int4.pack_nibbles(codes)), codes)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_batch(rows: int, seed: int) -> None:
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed))
    codes, scales = int4.quantize_groups(x)
    for i in range(rows):
        alone_codes, alone_scales = int4.quantize_groups(x[i])
        assert torch.equal(alone_codes, codes[i])
        assert torch.equal(alone_scales, scales[i])
