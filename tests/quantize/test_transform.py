"""Folding rotation and smoothing into weights and Hessians."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import inputs, weights

from omniw4.hadamard import hadamard64
from omniw4.quantize.rotate import transform_hessian, transform_weight
from omniw4.quantize.smooth import smoothing_vector


@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("smoothed", [False, True])
def test_outputs_and_hessian_are_those_of_the_transformed_input(rotation: str, smoothed: bool) -> None:
    x, w = inputs(40, 192).double(), weights(24, 192).double()
    smooth = torch.linspace(0.5, 2, 192).half() if smoothed else None
    moved = x / smooth.double() if smooth is not None else x
    moved = hadamard64(moved) if rotation == "hadamard64" else moved
    torch.testing.assert_close(moved @ transform_weight(w, rotation, smooth).T, x @ w.T)  # type: ignore[arg-type]
    hessian = transform_hessian(x.T @ x, rotation, smooth)  # type: ignore[arg-type]
    torch.testing.assert_close(hessian, moved.T @ moved)
    assert torch.equal(hessian, hessian.T)


def test_smoothing_evens_out_the_activations() -> None:
    x, w = inputs(100, 128), weights(32, 128)
    act, weight = x.abs().amax(0), w.abs().amax(0)

    def spread(values: torch.Tensor) -> float:
        return float(values.max() / values.min())

    for strength in (0.5, 1.0):
        s = smoothing_vector(act, weight, strength, torch.float16).float()
        assert spread(act / s) < spread(act)
    flat = smoothing_vector(act, weight, 1.0, torch.float16).float()
    assert spread(act / flat) == pytest.approx(1.0, abs=0.01)


def test_smoothing_by_rms_is_the_least_noise_of_a_rotated_group() -> None:
    """Σ(a/s)²·Σ(b·s)² against the bound of Cauchy and Schwarz, and against other vectors."""
    x, w = inputs(100, 64), weights(32, 64) * torch.linspace(0.2, 3, 64)
    act, weight = x.square().mean(0).sqrt().double(), w.square().mean(0).sqrt().double()

    def noise(s: torch.Tensor) -> float:
        return float((act / s).square().sum() * (weight * s).square().sum())

    optimum = smoothing_vector(act, weight, 0.5, torch.float16).double()
    assert noise(optimum) == pytest.approx(float((act * weight).sum()) ** 2, rel=1e-4)
    for strength in (0.0, 0.3, 0.7, 1.0):
        assert noise(smoothing_vector(act, weight, strength, torch.float16).double()) > noise(optimum)
    assert noise(torch.ones(64, dtype=torch.float64)) > noise(optimum)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_smoothing_is_finite_and_positive_whatever_the_channels(dtype: torch.dtype) -> None:
    act, weight = torch.rand(128) + 0.1, torch.rand(128) + 0.1
    act[0], weight[1] = 0, 0  # dead channels
    act[2], act[3] = 1e30, 1e-30
    s = smoothing_vector(act, weight, 0.5, dtype)
    assert s.dtype == dtype
    assert torch.isfinite(s).all()
    assert (s > 0).all()
    assert torch.isfinite(s.reciprocal()).all()
    assert s[0] == s[1] == 1
    assert (smoothing_vector(torch.zeros(64), torch.rand(64), 0.5, dtype) == 1).all()
