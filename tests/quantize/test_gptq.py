"""GPTQ: against a naive loop, against brute force, and on Hessians that are hard."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import best_codes, inputs, naive_gptq, nearest, run_gptq, weights

from omniw4 import int4
from omniw4.quantize.gptq import factorise, gptq
from omniw4.quantize.layer import relative_error


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    return (x.T @ x / len(x)).double()


def upper_of(hessian: torch.Tensor, damp: float = 0.01) -> torch.Tensor:
    factor = factorise(hessian.double(), damp)
    assert factor.upper is not None
    return factor.upper


@pytest.mark.parametrize("k", [64, 192, 320])
def test_equals_the_naive_loop(k: int) -> None:
    w, h = weights(5, k), hessian_of(inputs(400, k))
    codes, scales = run_gptq(w, upper_of(h), "absmax")
    naive_codes, naive_scales = naive_gptq(w, h, 0.01)
    # FP32 against FP64: a value at a rounding tie may fall to the other side, and moves everything after it.
    differing = (codes != naive_codes).float().mean().item()
    assert differing < 0.01, f"{differing:.1%} of codes differ, first at {(codes != naive_codes).nonzero()[0].tolist()}"
    torch.testing.assert_close(scales.float(), naive_scales.float(), rtol=0.02, atol=0)
    error = relative_error(w - int4.dequantize(codes, scales), w, h.float())
    naive_error = relative_error(w - int4.dequantize(naive_codes, naive_scales), w, h.float())
    assert error == pytest.approx(naive_error, rel=0.01)


def test_codes_equal_the_naive_loop_exactly_on_one_group() -> None:
    w, h = weights(3, 64, seed=5), hessian_of(inputs(300, 64, seed=6))
    codes, scales = run_gptq(w, upper_of(h), "absmax")
    naive_codes, naive_scales = naive_gptq(w, h, 0.01)
    assert torch.equal(scales, naive_scales)
    assert torch.equal(codes, naive_codes)


@pytest.mark.parametrize("block_size", [64, 128, 192, 512])
def test_block_size_changes_nothing_but_rounding(block_size: int) -> None:
    w, upper = weights(16, 512), upper_of(hessian_of(inputs(600, 512)))
    codes, scales = run_gptq(w, upper, "absmax", block_size)
    reference_codes, reference_scales = run_gptq(w, upper, "absmax", 64)
    assert (codes != reference_codes).float().mean() < 0.01
    torch.testing.assert_close(scales.float(), reference_scales.float(), rtol=0.02, atol=0)


def test_rows_are_independent() -> None:
    """Stacking linears of one input along N is the same problem."""
    w, upper = weights(24, 128), upper_of(hessian_of(inputs(300, 128)))
    codes, scales = run_gptq(w, upper, "search")
    part_codes, part_scales = run_gptq(w[8:20], upper, "search")
    assert (codes[8:20] != part_codes).float().mean() < 0.01
    torch.testing.assert_close(scales[8:20].float(), part_scales.float(), rtol=0.02, atol=0)


def test_batches_are_independent() -> None:
    w = torch.stack([weights(6, 128, seed=s) for s in range(3)])
    h = torch.stack([hessian_of(inputs(300, 128, seed=s)) for s in range(3)])
    upper = upper_of(h)
    codes, scales = run_gptq(w, upper, "search")
    for b in range(3):
        one_codes, one_scales = run_gptq(w[b], upper_of(h[b]), "search")
        assert (codes[b] != one_codes).float().mean() < 0.01, f"batch {b}"
        torch.testing.assert_close(scales[b].float(), one_scales.float(), rtol=0.02, atol=0)


def test_against_brute_force_on_three_live_columns() -> None:
    """Never better than the best of all 16³ codes, and over many problems close to it where rounding is not."""
    free = [3, 40, 63]
    found, optimal, nearest = 0.0, 0.0, 0.0
    h = torch.zeros(64, 64, dtype=torch.float64)
    h[torch.tensor(free)[:, None], torch.tensor(free)] = 0.6 + 0.4 * torch.eye(3, dtype=torch.float64)
    for seed in range(20):
        w = torch.zeros(1, 64)
        w[0, free] = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        codes, scales = run_gptq(w, upper_of(h, 1e-6), "absmax")
        error = output_error(w - int4.dequantize(codes, scales), h)
        optimum = best_codes(w[0], h, float(scales[0, 0]), free)
        rounded = output_error(w - int4.dequantize(int4.encode(w, scales, -8, 7), scales), h)
        assert error >= optimum * (1 - 1e-4), f"seed {seed}"
        found, optimal, nearest = found + error, optimal + optimum, nearest + rounded
    assert found < 1.5 * optimal
    assert found < nearest


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float((difference.double() @ hessian @ difference.double().T).trace())


def test_beats_rounding_to_nearest() -> None:
    w, h = weights(64, 256), hessian_of(inputs(1000, 256))
    plain = relative_error(w - int4.dequantize(*nearest(w, torch.ones(256), "absmax")), w, h.float())
    compensated = relative_error(w - int4.dequantize(*run_gptq(w, upper_of(h), "absmax")), w, h.float())
    assert compensated < 0.6 * plain


def test_an_uncorrelated_hessian_rounds_to_nearest() -> None:
    w = weights(32, 192)
    codes, scales = run_gptq(w, upper_of(torch.eye(192)), "absmax")
    nearest_codes, nearest_scales = nearest(w, torch.ones(192), "absmax")
    assert torch.equal(scales, nearest_scales)
    assert torch.equal(codes, nearest_codes)


def test_the_factor_is_the_cholesky_factor_of_the_inverse() -> None:
    h = hessian_of(inputs(500, 128))
    upper = upper_of(h, 0.05).double()
    damped = h + 0.05 * h.diagonal().mean() * torch.eye(128, dtype=torch.float64)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(128, dtype=torch.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 63])
def test_rank_deficient_hessians_factorise_with_the_first_damping(tokens: int) -> None:
    h = hessian_of(inputs(tokens, 128))
    factor = factorise(h, 0.01)
    assert factor.damp == 0.01
    assert factor.log == []
    codes, scales = run_gptq(weights(8, 128), upper_of(h), "search")
    assert torch.isfinite(scales).all()
    assert (codes != 0).any()


def test_dead_channels_round_to_nearest_and_disturb_nobody() -> None:
    dead, live = [0, 5, 64, 127], [j for j in range(128) if j not in (0, 5, 64, 127)]
    x = inputs(300, 128)
    x[:, dead] = 0
    upper = upper_of(hessian_of(x))
    w = weights(8, 128)
    w[:, dead] *= 0.1  # never a group's largest, so that the scales do not depend on them
    codes, scales = run_gptq(w, upper, "absmax")
    for column in dead:
        expected = int4.encode(w[:, column, None], scales[:, column // 64, None], -8, 7)
        assert torch.equal(codes[:, column, None], expected), f"column {column}"
    w[:, dead] = 0
    other, other_scales = run_gptq(w, upper, "absmax")
    assert torch.equal(scales, other_scales)
    assert torch.equal(codes[:, live], other[:, live])


def test_an_indefinite_hessian_raises_the_damping_in_logged_steps() -> None:
    h = hessian_of(inputs(500, 64))
    h -= 0.05 * h.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    assert torch.linalg.eigvalsh(h)[0] < -0.01 * h.diagonal().mean()
    factor = factorise(h, 0.01)
    assert factor.upper is not None
    assert factor.damp > 0.01
    assert len(factor.log) == round(torch.tensor(factor.damp / 0.01).log10().item())
    assert "0.01" in factor.log[0]


def test_past_the_last_damping_there_is_no_factor() -> None:
    h = torch.eye(64, dtype=torch.float64)
    h[0, 1] = h[1, 0] = 1e6
    factor = factorise(h, 0.01)
    assert factor.upper is None
    assert factor.damp == pytest.approx(10)
    assert len(factor.log) == 4


def test_a_zero_hessian_has_no_factor() -> None:
    factor = factorise(torch.zeros(64, 64, dtype=torch.float64), 0.01)
    assert factor.upper is None
    assert "zero" in factor.log[0]


def naive_integer_gptq(w: torch.Tensor, hessian: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``naive_gptq``, a group's step being the smallest multiple of the row's scale that spans it."""
    w, k = w.double().clone(), w.shape[1]
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64))
    codes, scales = torch.zeros(w.shape, dtype=torch.int8), torch.zeros(len(w), k // 64, dtype=torch.uint8)
    for j in range(k):
        if j % 64 == 0:
            absmax = w[:, j : j + 64].abs().amax(1)
            scales[:, j // 64] = (absmax / 7 / rows.double()).ceil().clamp(1, 16).to(torch.uint8)
        step = rows.double() * scales[:, j // 64].double()
        codes[:, j] = (w[:, j] / step).round().clamp(-8, 7).to(torch.int8)
        error = (w[:, j] - codes[:, j].double() * step) / inverse[j, j]
        w[:, j:] -= error[:, None] * inverse[j, j:]
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, scales


@pytest.mark.parametrize("k", [64, 192])
def test_integer_scales_equal_the_naive_loop(k: int) -> None:
    w, h = weights(5, k), hessian_of(inputs(400, k))
    rounded = gptq(w, upper_of(h), "absmax", scale_type="integer")
    assert rounded.rows is not None
    torch.testing.assert_close(rounded.rows, w.unflatten(1, (-1, 64)).abs().amax((1, 2)) / 112)
    codes, scales = naive_integer_gptq(w, h, rounded.rows)
    assert (rounded.scales != scales).float().mean() < 0.05
    assert (rounded.codes != codes).float().mean() < 0.02


def test_integer_scales_cost_little_against_the_hessian() -> None:
    w, h = weights(64, 512), hessian_of(inputs(1000, 512))
    errors = []
    for kind in ("float16", "integer"):
        rounded = gptq(w, upper_of(h), "search", scale_type=kind)  # type: ignore[arg-type]
        errors.append(relative_error(w - rounded.dequantize(), w, h.float()))
    assert errors[1] < 1.06 * errors[0]
