"""How far a quantized linear is from the original: relative output error and signal over noise."""

from __future__ import annotations

import math

import torch

_SMALLEST = 1e-24  # output energy below which terms of the sum may have been lost in FP32


def relative_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None) -> float:
    """``tr(E·H·Eᵀ) / tr(W·H·Wᵀ)``: squared output error over squared output; H = identity when None.

    0 when both are zero (a linear of zeros, kept as zeros).

    Args:
        difference: ``[N, K]`` E = W - Ŵ.
        weight: ``[N, K]``.
        hessian: ``[K, K]`` float32 or None.
    """
    error, signal = _output_energy(difference, hessian), _output_energy(weight, hessian)
    if not _SMALLEST < signal < math.inf:  # out of FP32's range, though the quotient is not: take powers of two out
        unit, scaled = _power_of_two(weight), None if hessian is None else hessian * _power_of_two(hessian)
        error, signal = _output_energy(difference * unit, scaled), _output_energy(weight * unit, scaled)
    if signal > 0:
        return error / signal
    return 0.0 if error == 0 else math.inf


def sqnr_db(error: float) -> float:
    """Signal over quantization noise in decibels of a relative error; inf for a perfect layer."""
    return 0.0 - 10 * math.log10(error) if error > 0 else math.inf


def _power_of_two(x: torch.Tensor) -> float:
    """What brings the largest magnitude near 1; 1 for zeros."""
    largest = float(x.abs().max())
    return 2.0 ** min(-math.frexp(largest)[1], 126) if largest > 0 else 1.0


def _output_energy(weight: torch.Tensor, hessian: torch.Tensor | None) -> float:
    outputs = weight if hessian is None else weight @ hessian
    return max(0.0, float((outputs * weight).sum(dtype=torch.float64)))
