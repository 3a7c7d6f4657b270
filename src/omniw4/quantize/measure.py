"""How far a quantized linear is from the original: relative output error and signal over noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from omniw4.products import product

_SMALLEST = 1e-24  # output energy below which terms of the sum may have been lost in FP32


def relative_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None) -> float:
    """``tr(E·H·Eᵀ) / tr(W·H·Wᵀ)``: squared output error over squared output; H = identity when None.

    0 when both are zero (a linear of zeros, kept as zeros).

    Args:
        difference: ``[N, K]`` E = W - Ŵ.
        weight: ``[N, K]``.
        hessian: ``[K, K]`` float32 or None.
    """
    moments = None if hessian is None else hessian[None]
    signals = output_energies(weight[None], moments)
    return relative_errors(difference[None], weight[None], moments, signals)[0]


def relative_errors(
    difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None, signals: Sequence[float]
) -> list[float]:
    """:func:`relative_error` of B linears ``[B, N, K]``, whose weights' :func:`output_energies` are known."""
    found = []
    for b, (error, signal) in enumerate(zip(output_energies(difference, hessian), signals, strict=True)):
        if not _SMALLEST < signal < math.inf:  # out of FP32's range, though the quotient is not
            error, signal = _scaled_energies(difference[b], weight[b], None if hessian is None else hessian[b])
        found.append(error / signal if signal > 0 else (0.0 if error == 0 else math.inf))
    return found


def output_energies(weight: torch.Tensor, hessian: torch.Tensor | None) -> list[float]:
    """``tr(W·H·Wᵀ)``, squared outputs, of each of B linears ``[B, N, K]``; H ``[B, K, K]``, or identity when None."""
    outputs = weight if hessian is None else product(weight, hessian)
    energies: list[float] = (outputs * weight).sum((-1, -2), dtype=torch.float64).clamp(min=0).tolist()
    return energies


def sqnr_db(error: float) -> float:
    """Signal over quantization noise in decibels of a relative error; inf for a perfect layer."""
    return 0.0 - 10 * math.log10(error) if error > 0 else math.inf


def _scaled_energies(
    difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None
) -> tuple[float, float]:
    """Energies of difference and weight ``[N, K]`` over one factor that brings the largest weight and moment near 1."""
    unit, moments = _power_of_two(weight), None if hessian is None else (hessian * _power_of_two(hessian))[None]
    error, signal = (output_energies((matrix * unit)[None], moments)[0] for matrix in (difference, weight))
    return error, signal


def _power_of_two(x: torch.Tensor) -> float:
    """What brings the largest magnitude near 1; 1 for zeros."""
    largest = float(x.abs().max())
    return 2.0 ** min(-math.frexp(largest)[1], 126) if largest > 0 else 1.0
