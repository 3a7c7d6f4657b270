"""The 64-wide Hadamard rotation, in the one summation order every kernel follows."""

from __future__ import annotations

import torch

from omniw4.errors import OpError

WIDTH = 64
_NORM = 0.125  # 1/sqrt(64): a power of two, so normalising is exact


def hadamard64(x: torch.Tensor) -> torch.Tensor:
    """Multiply each group of 64 along the last axis by the normalised Sylvester Hadamard matrix H64.

    ``x[..., K] -> x · blockdiag(H64, …)``. H64 is symmetric and orthogonal, so the function is its own inverse.
    Computed in FP32 (FP64 for FP64 input) as six butterfly stages with strides 1, 2, 4, 8, 16, 32, each
    ``(a + b, a - b)``, then one exact multiplication by 1/8. Kernels use the same order, so FP32 results agree bit
    for bit.

    Args:
        x: ``[..., K]`` float, K a multiple of 64.

    Returns:
        ``[..., K]`` float32 (float64 for float64 input).

    Raises:
        OpError: K is not a multiple of 64.
    """
    if x.shape[-1] % WIDTH:
        raise OpError(f"hadamard64 needs a last dimension that is a multiple of 64, found {tuple(x.shape)}")
    shape = x.shape
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    stride = 1
    while stride < WIDTH:
        pairs = y.reshape(-1, WIDTH // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), dim=2)
        stride *= 2
    return y.reshape(shape) * _NORM
