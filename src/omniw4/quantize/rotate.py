"""Fold smoothing and rotation into weights and Hessians.

The layer sees ``x' = (x / smooth)·B`` with B the block-diagonal Hadamard matrix (or the identity), so that

    y = x·Wᵀ = x'·W'ᵀ    with  W' = W·D·B      (D = diag(smooth), B = Bᵀ = B⁻¹)
    H' = E[x'ᵀx'] = Bᵀ·D⁻¹·H·D⁻¹·B

Everything after this file works on W' and H' alone.
"""

from __future__ import annotations

import torch

from omniw4.hadamard import WIDTH, hadamard64
from omniw4.tensors import Rotation


def transform_weight(weight: torch.Tensor, rotation: Rotation, smooth: torch.Tensor | None = None) -> torch.Tensor:
    """``W·D·B``.

    Args:
        weight: ``[..., N, K]`` float.
        rotation: ``"none"`` or ``"hadamard64"``.
        smooth: ``[K]`` divisors of the activations, or None.

    Returns:
        ``[..., N, K]`` float32 (float64 for float64 input).
    """
    weight = weight if weight.dtype == torch.float64 else weight.float()
    if smooth is not None:
        weight = weight * smooth.to(weight.dtype)
    return hadamard64(weight) if rotation == "hadamard64" else weight


def transform_hessian(hessian: torch.Tensor, rotation: Rotation, smooth: torch.Tensor | None = None) -> torch.Tensor:
    """``Bᵀ·D⁻¹·H·D⁻¹·B``, symmetric to the last bit.

    Args:
        hessian: ``[..., K, K]`` float, symmetric.

    Returns:
        ``[..., K, K]`` float64.
    """
    hessian = hessian.double()
    if smooth is not None:
        inverse = smooth.double().reciprocal()
        hessian = hessian * inverse * inverse[:, None]
    if rotation == "hadamard64":
        h64 = hadamard64(torch.eye(WIDTH, dtype=hessian.dtype, device=hessian.device))  # exact: ±1/8
        rows = h64 @ hessian.unflatten(-2, (-1, WIDTH))  # [..., K/64, 64, K]: Bᵀ·H
        hessian = (rows.flatten(-3, -2).unflatten(-1, (-1, WIDTH)) @ h64).flatten(-2)
    return (hessian + hessian.transpose(-1, -2)) / 2
