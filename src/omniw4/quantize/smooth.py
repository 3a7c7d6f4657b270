"""Move the activations' uneven channels into the weights, channel by channel.

Two measures of a channel's size. By absmax this is SmoothQuant (arXiv 2211.10438, equation 4). By RMS, with strength
1/2 and a rotation behind it, it is optimal: the rotation spreads a group's noise evenly over its channels, so the
error that activation codes add is proportional to ``Σ_j (a_j/s_j)² · Σ_j (b_j·s_j)²``, a_j and b_j the RMS of
channel j in activations and weights, both sums over the group; and so, with the factors swapped, is the error of the
weight codes. By Cauchy and Schwarz no s makes the product smaller than ``(Σ_j a_j·b_j)²``, which ``s_j² = a_j/b_j``
reaches.

That leaves out what a search (``recipe.smooth.strength: search``) can see: how the errors of weights lie in the
Hessian, channels of a group that go up and down together and so are uneven behind the rotation too, and the low-rank
branch, which takes part of the weights out of what the activations' codes multiply. :func:`modelled_error` has all
three, from the Hessian behind smoothing and rotation.
"""

from __future__ import annotations

import math

import torch

from omniw4 import int4
from omniw4.quantize.measure import relative_error
from omniw4.quantize.scales import ScaleRule, round_to_nearest
from omniw4.tensors import LinearSpec

STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # what a search tries; 0 is no smoothing, as in a recipe
_DEVIATIONS, _POINTS = 8.0, 512  # of the integral: to so many standard deviations, in so many steps
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


def modelled_error(
    weight: torch.Tensor, start: torch.Tensor, hessian: torch.Tensor, spec: LinearSpec, rule: ScaleRule
) -> float:
    """The relative output error of a linear that is to be expected behind a smoothing vector and a rotation.

    The error of the weights is that of rounding to nearest, ``tr(E·H·Eᵀ)``. To it come the errors of the activations'
    codes, independent of each other and of everything else: ``Σ_k v_k·Σ_n ŵ[n,k]²`` with v of
    :func:`activation_noise`. The sum is taken over ``tr(W·H·Wᵀ)``, which no smoothing changes.

    Args:
        weight: ``[N, K]`` float32 W', in the transformed space.
        start: ``[N, K]`` float32, what the codes hold of it: W', or what the low-rank branch leaves over.
        hessian: ``[K, K]`` float32 of x'.
        spec: its activation bits, clip and type of scales.
        rule: how the scales of the weights are chosen.
    """
    diagonal = hessian.diagonal()
    codes = round_to_nearest(start, diagonal, rule, spec.scale_type).dequantize()
    error = relative_error(start - codes, weight, hessian)
    noise = activation_noise(diagonal, spec.act_bits, spec.act_clip).to(codes.dtype)
    signal = float(((weight @ hessian) * weight).sum(dtype=torch.float64))
    added = float((codes.square() @ noise).sum(dtype=torch.float64))
    return error + (added / signal if 0 < signal < math.inf else 0.0)


def activation_noise(diagonal: torch.Tensor, act_bits: int, clip: float) -> torch.Tensor:
    """Variance of the rounding error of each channel of x', its groups being Gaussian: ``step²/12``.

    The step is ``clip/7`` of the largest magnitude in a group of 64, with 8 bits ``clip/127`` of that of the token.
    What clipping and the rounding of scales add is left out, being much the same for every smoothing.

    Args:
        diagonal: ``[K]`` mean squares of x', the diagonal of its Hessian.
        act_bits: 4, 8 or 16; nothing is rounded with 16.

    Returns:
        ``[K]`` float64.
    """
    variances = diagonal.double().clamp(min=0)
    if act_bits == 16:
        return torch.zeros_like(variances)
    parts = int4.split_groups(variances) if act_bits == 4 else variances[None]
    steps = clip / (int4.INT4_MAX if act_bits == 4 else int4.INT8_MAX)
    return (expected_peak(parts) * steps**2 / 12)[:, None].expand(parts.shape).flatten()


def expected_peak(variances: torch.Tensor) -> torch.Tensor:
    """``E[max_j x_j²]`` of independent Gaussians of mean 0.

    ``∫ 2s·(1 - Π_j erf(s/√(2·v_j))) ds`` over s from 0 on, by the trapezoidal rule.

    Args:
        variances: ``[..., n]`` float64, not negative.

    Returns:
        ``[...]`` float64.
    """
    largest = variances.amax(-1, keepdim=True)
    shares = (variances / largest.clamp(min=1e-300))[..., None]  # [..., n, 1], 1 for the largest
    s = torch.linspace(0, _DEVIATIONS, _POINTS + 1, dtype=variances.dtype, device=variances.device)
    below = torch.special.erf(s / (2 * shares).sqrt().clamp(min=1e-30)).prod(-2)  # [..., points]
    return torch.trapezoid(2 * s * (1 - below), s, dim=-1) * largest[..., 0]
