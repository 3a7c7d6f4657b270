"""Laws of the grid: what must hold of codes, scales and bytes whatever the numbers."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples

from omniw4 import int4
from omniw4.hadamard import hadamard64


def numbers(count: int) -> st.SearchStrategy[torch.Tensor]:
    """Any FP16 numbers, as FP32; those that are none are zero."""
    patterns = st.binary(min_size=2 * count, max_size=2 * count)
    values = patterns.map(lambda b: torch.frombuffer(bytearray(b), dtype=torch.float16).float())
    exponents = st.sampled_from([None, -14, -3, 0, 4])  # all of one size, or of every size

    def sized(x: torch.Tensor, exponent: int | None) -> torch.Tensor:
        x = torch.where(x.isfinite(), x, torch.zeros_like(x))
        return x if exponent is None else torch.frexp(x)[0] * 2.0**exponent

    return st.builds(sized, values, exponents)


GROUP = numbers(64)
CLIP = st.sampled_from([1.0, 0.97, 0.9, 0.5])
BYTES = st.binary(min_size=1, max_size=96).map(lambda b: torch.frombuffer(bytearray(b), dtype=torch.uint8))


@examples(100)
@given(BYTES)
def test_unpack_then_pack_is_the_identity_on_all_bytes(packed: torch.Tensor) -> None:
    codes = int4.unpack_nibbles(packed)
    assert codes.shape[-1] == 2 * packed.shape[-1]
    assert int(codes.min()) >= -8
    assert int(codes.max()) <= 7
    assert torch.equal(int4.pack_nibbles(codes), packed)


@examples(100)
@given(BYTES, st.integers(0, 2**31))
def test_one_code_is_half_of_one_byte(packed: torch.Tensor, seed: int) -> None:
    codes = int4.unpack_nibbles(packed)
    column = seed % codes.shape[-1]
    changed = codes.clone()
    changed[column] = (changed[column] + 8 + 1 + seed % 15) % 16 - 8
    difference = int4.pack_nibbles(changed) ^ packed
    assert difference.nonzero().flatten().tolist() == [column // 2]
    assert int(difference[column // 2]) & (0x0F if column % 2 else 0xF0) == 0


@examples(100)
@given(GROUP, CLIP)
def test_a_code_is_the_nearest_on_its_grid(values: torch.Tensor, clip: float) -> None:
    """Within half a step of the value, or at the end of the grid towards it."""
    codes, scales = int4.quantize_groups(values[None], clip)
    step = scales.double()[0, 0]
    left = values.double() - codes[0].double() * step
    inner = (codes[0] > int4.INT4_MIN) & (codes[0] < int4.INT4_MAX)
    half = step / 2 * (1 + 2**-20)  # the reciprocal and the product are rounded to FP32 each
    assert bool((left[inner].abs() <= half).all())
    assert bool((left[codes[0] == int4.INT4_MAX] >= -half).all())
    assert bool((left[codes[0] == int4.INT4_MIN] <= half).all())


@examples(60)
@given(GROUP, CLIP)
def test_larger_values_have_no_smaller_codes(values: torch.Tensor, clip: float) -> None:
    codes = int4.quantize_groups(values[None], clip)[0][0]
    assert bool((codes[values.argsort()].diff() >= 0).all())


@examples(60)
@given(GROUP)
def test_the_grid_is_symmetric(values: torch.Tensor) -> None:
    """Without clipping, minus x has minus the codes; no code is -8."""
    codes, scales = int4.quantize_groups(values[None])
    negative, same = int4.quantize_groups(-values[None])
    assert torch.equal(negative, -codes)
    assert torch.equal(scales, same)
    assert int(codes.min()) >= -7


@examples(60)
@given(GROUP, st.integers(-6, 6))
def test_a_power_of_two_goes_into_the_scale(values: torch.Tensor, power: int) -> None:
    largest = float(values.abs().max())
    assume(2.0**-6 < largest < 2.0**8)  # both scales normal and finite
    codes, scales = int4.quantize_groups(values[None])
    moved, larger = int4.quantize_groups(values[None] * 2.0**power)
    assert torch.equal(moved, codes)
    assert torch.equal(larger, scales * 2.0**power)


@examples(60)
@given(GROUP, st.randoms(use_true_random=False))
def test_order_inside_a_group_does_not_matter(values: torch.Tensor, random: object) -> None:
    order = list(range(64))
    random.shuffle(order)  # type: ignore[attr-defined]
    codes, scales = int4.quantize_groups(values[None])
    shuffled, same = int4.quantize_groups(values[order][None])
    assert torch.equal(shuffled, codes[:, order])
    assert torch.equal(same, scales)


@examples(60)
@given(GROUP)
def test_quantizing_what_was_dequantized_changes_nothing(values: torch.Tensor) -> None:
    codes, scales = int4.quantize_groups(values[None])
    assume(bool((scales > int4.SCALE_MIN).all()))
    again, same = int4.quantize_groups(int4.dequantize(codes, scales))
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


@examples(40)
@given(numbers(128))
def test_one_scale_a_token(values: torch.Tensor) -> None:
    codes, scales = int4.quantize_tokens(values[None])
    assert scales.shape == (1, 1)
    left = (values.double() - codes[0].double() * scales.double()).abs()
    assert bool((left <= scales.double() / 2 * (1 + 2**-20)).all())


@examples(40)
@given(GROUP)
def test_the_rotation_is_its_own_inverse_and_keeps_lengths(values: torch.Tensor) -> None:
    x = values.double()[None]
    turned = hadamard64(x)
    torch.testing.assert_close(hadamard64(turned), x, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(turned.norm(), x.norm(), rtol=1e-12, atol=1e-9)
