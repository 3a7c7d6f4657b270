"""The integer semantics: grid, rounding, clamp, zero group, pack and unpack of nibbles.

Everything that quantizes (weights offline, activations in the reference ops, the CUDA kernels) follows the formulas
of this file; docs/numerics.md is the prose. All arithmetic is FP32 with IEEE rounding, so that codes and scales can
be compared bit for bit between the CPU, a GPU and the kernels.
"""

from __future__ import annotations

import torch

from omniw4.errors import OpError

GROUP_SIZE = 64
INT4_MIN, INT4_MAX = -8, 7
INT8_MIN, INT8_MAX = -128, 127
SCALE_MIN = 2.0**-14  # smallest normal FP16
SCALE_MAX = 65504.0  # largest finite FP16


def scale_from_absmax(absmax: torch.Tensor, qmax: int, clip: float = 1.0) -> torch.Tensor:
    """FP16 scale of a group whose largest magnitude is ``absmax``: ``absmax · (clip / qmax)``.

    Zero stays exactly zero. A non-zero scale below the smallest normal FP16 is raised to it, a finite one above the
    largest FP16 is lowered to it. NaN and inf stay, so that a non-finite group gives NaN outputs, never plausible
    ones.

    Args:
        absmax: ``[...]`` float, not negative.
        qmax: 7 for INT4, 127 for INT8.
        clip: fraction of absmax that the grid spans; the multiplier ``clip / qmax`` is rounded once to FP32.

    Returns:
        ``[...]`` float16.
    """
    factor = torch.tensor(clip / qmax, dtype=torch.float32, device=absmax.device)
    absmax = absmax.float()
    scale = (absmax * factor).clamp(SCALE_MIN, SCALE_MAX)
    scale = torch.where(torch.isfinite(absmax), scale, absmax)
    return torch.where(absmax == 0, torch.zeros_like(scale), scale).to(torch.float16)


def encode(x: torch.Tensor, scales: torch.Tensor, qmin: int, qmax: int) -> torch.Tensor:
    """Codes of ``x`` on the grid of ``scales``: ``clamp(rint(x · (1 / scale)), qmin, qmax)``.

    The reciprocal and the product are each rounded to FP32; rint rounds half to even. A zero scale gives code 0; a
    NaN product gives code 0 (its scale is non-finite, so the value it stands for is NaN).

    Args:
        x: ``[..., n]`` float, the values that share a scale in the last axis.
        scales: ``[..., 1]`` float16.

    Returns:
        ``[..., n]`` int8.
    """
    s = scales.float()
    inverse = torch.where(s == 0, torch.zeros_like(s), torch.reciprocal(s))
    codes = torch.round(x.float() * inverse)
    return torch.nan_to_num(codes, nan=0.0).clamp(qmin, qmax).to(torch.int8)


def quantize_groups(x: torch.Tensor, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT4 per group of 64 along the last axis.

    Args:
        x: ``[..., K]`` float, K a multiple of 64.
        clip: see :func:`scale_from_absmax`.

    Returns:
        codes ``[..., K]`` int8 in [-8, 7] and scales ``[..., K/64]`` float16.

    Raises:
        OpError: K is not a multiple of 64.
    """
    groups = split_groups(x.float())
    scales = scale_from_absmax(groups.abs().amax(-1), INT4_MAX, clip)
    return encode(groups, scales[..., None], INT4_MIN, INT4_MAX).reshape(x.shape), scales


def quantize_tokens(x: torch.Tensor, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 with one scale for the whole last axis (one per token).

    Args:
        x: ``[..., K]`` float.
        clip: see :func:`scale_from_absmax`.

    Returns:
        codes ``[..., K]`` int8 in [-128, 127] and scales ``[..., 1]`` float16.
    """
    x = x.float()
    scales = scale_from_absmax(x.abs().amax(-1, keepdim=True), INT8_MAX, clip)
    return encode(x, scales, INT8_MIN, INT8_MAX), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``codes · scale``, each scale standing for an equal run of the last axis.

    Args:
        codes: ``[..., K]`` int8.
        scales: ``[..., S]`` float16 with S dividing K (K/64 groups, or 1).
        dtype: result dtype; the product of a code and an FP16 scale is exact in FP32 and FP64.

    Returns:
        ``[..., K]`` of ``dtype``; a zero scale gives exactly 0.
    """
    runs = codes.reshape(*codes.shape[:-1], scales.shape[-1], codes.shape[-1] // scales.shape[-1])
    return (runs.to(dtype) * scales[..., None].to(dtype)).reshape(codes.shape)


def split_groups(x: torch.Tensor) -> torch.Tensor:
    """``[..., K] -> [..., K/64, 64]``; raises OpError when 64 does not divide K."""
    if x.shape[-1] % GROUP_SIZE:
        raise OpError(f"group_size {GROUP_SIZE} does not divide the last dimension of {tuple(x.shape)}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte: byte j holds column 2j in the low nibble and column 2j+1 in the high one.

    Args:
        codes: ``[..., K]`` int8 in [-8, 7], K even.

    Returns:
        ``[..., K/2]`` uint8, nibbles in two's complement.

    Raises:
        OpError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise OpError(f"pack_nibbles needs an even last dimension, found {tuple(codes.shape)}")
    nibbles = codes.view(torch.uint8) & 0x0F if codes.dtype == torch.int8 else codes.to(torch.uint8) & 0x0F
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_nibbles`: ``[..., K/2]`` uint8 to ``[..., K]`` int8 in [-8, 7]."""
    nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
    return ((nibbles ^ 8).to(torch.int8)) - 8
