"""Move the activations' uneven channels into the weights, channel by channel.

Two measures of a channel's size. By absmax this is SmoothQuant (arXiv 2211.10438, equation 4). By RMS, with strength
1/2 and a rotation behind it, it is optimal: the rotation spreads a group's noise evenly over its channels, so the
error that activation codes add is proportional to ``Σ_j (a_j/s_j)² · Σ_j (b_j·s_j)²``, a_j and b_j the RMS of
channel j in activations and weights, both sums over the group; and so, with the factors swapped, is the error of the
weight codes. By Cauchy and Schwarz no s makes the product smaller than ``(Σ_j a_j·b_j)²``, which ``s_j² = a_j/b_j``
reaches.
"""

from __future__ import annotations

import torch

_SPREAD = 2.0**7  # factors stay within this of 1, so that FP16 activations divided by them stay finite


def smoothing_vector(act: torch.Tensor, weight: torch.Tensor, strength: float, dtype: torch.dtype) -> torch.Tensor:
    """``s_j = act_j^strength / weight_j^(1-strength)``, with geometric mean 1.

    The common factor is free (the scales of weights and activations absorb it), so it is chosen to keep the vector
    in the middle of the range of 16-bit floats. A channel that is dead in the activations or in the weights is left
    alone (s = 1).

    Args:
        act: ``[K]`` size of each input channel in calibration, absmax or RMS.
        weight: ``[K]`` size of each column, by the same measure, over all the linears that read this input.
        strength: 0 (the weights become flat) to 1 (the activations do).
        dtype: the 16-bit type it is stored in; the result is already rounded to it.

    Returns:
        ``[K]`` of ``dtype``, positive and finite.
    """
    act, weight = act.double(), weight.double()
    alive = (act > 0) & (weight > 0)
    if not bool(alive.any()):
        return torch.ones_like(act, dtype=dtype)
    log_s = strength * act.clamp(min=1e-30).log() - (1 - strength) * weight.clamp(min=1e-30).log()
    centred = torch.where(alive, log_s - log_s[alive].mean(), torch.zeros_like(log_s))
    return centred.exp().clamp(1 / _SPREAD, _SPREAD).to(dtype)
