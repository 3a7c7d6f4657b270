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


def test_the_ends_of_the_grids() -> None:
    """Clipped values stop at -128, 127, -8 and 7, and do not wrap; without a clip the grid spans the absmax."""
    x = torch.tensor([[-1.0, 1.0, *[0.25] * 62]])
    for clip in (0.5, 0.9):
        codes, _ = int4.quantize_tokens(x, clip)
        assert codes[0, :2].tolist() == [-128, 127]
        assert int4.quantize_groups(x, clip)[0][0, :2].tolist() == [-8, 7]
        assert int4.quantize_groups_integer(x, clip)[0][0, :2].tolist() == [-8, 7]
    for quantize in (int4.quantize_groups, int4.quantize_tokens, int4.quantize_groups_integer):
        for found, wanted in zip(quantize(x), quantize(x, 1.0), strict=True):
            assert torch.equal(found, wanted)
    assert torch.equal(int4.scale_from_absmax(x.abs(), 7), int4.scale_from_absmax(x.abs(), 7, 1.0))
    assert int4.encode(torch.tensor([float("nan"), 1.0]), torch.ones(1), -8, 7).tolist() == [0, 1]


@examples(60)
@given(numbers(256), CLIP)
def test_integer_scales_follow_their_formula(values: torch.Tensor, clip: float) -> None:
    """One number after another, each operation rounded to FP32."""

    def fp32(number: float) -> float:
        return float(torch.tensor(number, dtype=torch.float32))

    codes, scales, token = int4.quantize_groups_integer(values[None], clip)
    groups = values.reshape(4, 64)
    full = float(values.abs().max())
    t = 0.0 if full == 0 else max(fp32(full * fp32(clip / 112)), 2.0**-100)
    assert float(token) == t
    for g in range(4):
        absmax = float(groups[g].abs().max())
        s = 0 if full == 0 else min(16, max(1, round(fp32(fp32(absmax * fp32(1 / t)) * fp32(clip / 7)))))
        assert int(scales[0, g]) == s
        step = fp32(t * s)
        inverse = 0.0 if step == 0 else fp32(1 / step)
        wanted = [max(-8, min(7, round(fp32(float(x) * inverse)))) for x in groups[g]]
        assert codes[0].reshape(4, 64)[g].tolist() == wanted
    widened = int4.widen(codes, scales)
    assert widened.dtype == torch.int8
    assert torch.equal(widened.int(), codes.int() * scales.int().repeat_interleave(64, -1)), "it wrapped"
    assert torch.equal(int4.dequantize_integer(codes, scales, token), widened.float() * token)


def test_tokens_too_small_and_too_large_for_integer_scales() -> None:
    tiny = torch.full((1, 64), 1e-40)
    codes, scales, token = int4.quantize_groups_integer(tiny)
    assert float(token) == 2.0**-100
    assert scales.tolist() == [[1]]
    assert not codes.any(), "so small that nothing is left of it, and nothing is NaN"
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 128)
        x[0, 3] = bad
        codes, scales, token = int4.quantize_groups_integer(x)
        assert not token.isfinite().any()
        assert not int4.dequantize_integer(codes, scales, token).isfinite().any()
        assert int(scales.min()) >= 1
    assert int4.INTEGER_SCALE_MAX == 16
    zero = int4.quantize_groups_integer(torch.zeros(1, 64))
    assert [t.count_nonzero().item() for t in zero] == [0, 0, 0]


@examples(20)
@given(numbers(6 * 128))
def test_leading_dimensions_are_only_leading(values: torch.Tensor) -> None:
    x = values.reshape(2, 3, 128)
    for quantize in (int4.quantize_groups, int4.quantize_tokens, int4.quantize_groups_integer):
        for found, wanted in zip(quantize(x), quantize(x.reshape(6, 128)), strict=True):
            assert torch.equal(found.reshape(wanted.shape), wanted)
    codes, scales = int4.quantize_groups(x)
    assert torch.equal(int4.unpack_nibbles(int4.pack_nibbles(codes)), codes)
    assert torch.equal(int4.dequantize(codes, scales)[1, 2], int4.dequantize(codes[1, 2], scales[1, 2]))
    whole = int4.quantize_groups_integer(x)
    assert torch.equal(int4.dequantize_integer(*whole)[1, 2], int4.dequantize_integer(*(t[1, 2] for t in whole)))
