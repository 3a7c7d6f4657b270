"""SmoothQuant: move the activations' outliers into the weights, channel by channel."""

from __future__ import annotations

import torch

_SPREAD = 2.0**10  # smoothing factors stay within this factor of 1: FP16 activations divided by them stay finite


def smoothing_vector(
    act_absmax: torch.Tensor, weight_absmax: torch.Tensor, strength: float, dtype: torch.dtype
) -> torch.Tensor:
    """``s_j = absmax(X_j)^strength / absmax(W_j)^(1-strength)``, with geometric mean 1.

    The common factor is free (the scales of weights and activations absorb it), so it is chosen to keep the vector
    in the middle of the range of 16-bit floats. A channel that is dead in the activations or in the weights is left
    alone (s = 1).

    Args:
        act_absmax: ``[K]`` largest magnitude of each input channel in calibration.
        weight_absmax: ``[K]`` largest magnitude of each column, over all the linears that read this input.
        strength: 0 (everything stays) to 1 (activations become flat).
        dtype: the 16-bit type it is stored in; the result is already rounded to it.

    Returns:
        ``[K]`` of ``dtype``, positive and finite.

    Source: SmoothQuant, arXiv 2211.10438, equation 4.
    """
    act, weight = act_absmax.double(), weight_absmax.double()
    alive = (act > 0) & (weight > 0)
    if not bool(alive.any()):
        return torch.ones_like(act_absmax, dtype=dtype)
    log_s = strength * act.clamp(min=1e-30).log() - (1 - strength) * weight.clamp(min=1e-30).log()
    centred = torch.where(alive, log_s - log_s[alive].mean(), torch.zeros_like(log_s))
    return centred.exp().clamp(1 / _SPREAD, _SPREAD).to(dtype)
