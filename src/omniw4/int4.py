"""The integer semantics: grid, rounding, clamp, zero group, pack and unpack of nibbles.

Everything that quantizes (weights offline, activations in the reference ops, the CUDA kernels) follows the formulas
of this file; docs/numerics.md is the prose. All arithmetic is FP32 with IEEE rounding, so that codes and scales can
be compared bit for bit between the CPU, a GPU and the kernels.

Two kinds of group scales (``scale_type``). ``"float16"``: one FP16 scale a group. ``"integer"``: a group's scale is a
small integer times one FP32 scale of its row (of weights) or token (of activations)::

    ŵ[n, k] = row_scale[n] · m[n, g] · q[n, k]        x̂[t, k] = token_scale[t] · s[t, g] · q[t, k]

with q in [-8, 7] and m, s in 1..16, or 0 where the group is exactly zero. ``m·q`` and ``s·q`` fit INT8, so a product
of the two is one integer sum over all of K (:func:`widen`), with a single scale per row and token behind it.
"""

from __future__ import annotations

import torch

from omniw4.errors import OpError

GROUP_SIZE = 64
INT4_MIN, INT4_MAX = -8, 7
INT8_MIN, INT8_MAX = -128, 127
SCALE_MIN = 2.0**-14  # smallest normal FP16
SCALE_MAX = 65504.0  # largest finite FP16
INTEGER_SCALE_MAX = 16  # -8 · 16 is the smallest INT8
TOKEN_SCALE_MIN = 2.0**-100  # so far from the end of FP32 that its reciprocal is finite and no product underflows


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
        scales: ``[..., 1]`` float16 or float32.

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


def token_scales_from_absmax(absmax: torch.Tensor, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Integer group scales of activations, and the token scale they multiply.

    In FP32, every operation rounded once, with ``full`` the token's largest absmax::

        t = full · fp32(clip / (7·16)),  raised to 2^-100 where full > 0
        s = clamp(rint((absmax · (1/t)) · fp32(clip/7)), 1, 16)

    so the largest group has s = 16; where s is rounded down, the ends of a group clamp (docs/quality.md: rounding up
    is worse). An all-zero token has t = 0 and s = 0. NaN or inf in a token make its t NaN or inf (its outputs are then
    NaN); s of a NaN product is 1.

    Args:
        absmax: ``[..., K/64]`` float, not negative: largest magnitude of each group.
        clip: fraction of the largest absmax that the grid spans.

    Returns:
        group scales ``[..., K/64]`` uint8 in 0..16 and token scales ``[..., 1]`` float32.
    """
    absmax = absmax.float()
    full = absmax.amax(-1, keepdim=True)  # torch's amax keeps NaN
    factor = torch.tensor(clip / (INT4_MAX * INTEGER_SCALE_MAX), dtype=torch.float32, device=absmax.device)
    share = torch.tensor(clip / INT4_MAX, dtype=torch.float32, device=absmax.device)
    token = torch.where(full == 0, full, (full * factor).clamp(min=TOKEN_SCALE_MIN))
    steps = torch.round(absmax * torch.reciprocal(token) * share)
    steps = torch.nan_to_num(steps, nan=1.0).clamp(1, INTEGER_SCALE_MAX)
    return torch.where(full == 0, torch.zeros_like(steps), steps).to(torch.uint8), token


def encode_integer(x: torch.Tensor, scales: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Codes on the grid ``outer · scale``: ``clamp(rint(x · (1 / (outer · scale))), -8, 7)``.

    The product of the scales, its reciprocal and the product with x are each rounded to FP32; rint rounds half to
    even. A zero scale gives code 0, and so does a NaN product.

    Args:
        x: ``[..., K]`` float, K a multiple of 64.
        scales: ``[..., K/64]`` uint8.
        outer: ``[..., 1]`` float32: the row's or token's scale.

    Returns:
        ``[..., K]`` int8.

    Raises:
        OpError: K is not a multiple of 64.
    """
    step = outer.float() * scales.float()
    return encode(split_groups(x.float()), step[..., None], INT4_MIN, INT4_MAX).reshape(x.shape)


def quantize_groups_integer(x: torch.Tensor, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symmetric INT4 per group of 64 along the last axis, with integer group scales.

    Args:
        x: ``[..., K]`` float, K a multiple of 64.
        clip: see :func:`token_scales_from_absmax`.

    Returns:
        codes ``[..., K]`` int8 in [-8, 7], group scales ``[..., K/64]`` uint8 and token scales ``[..., 1]`` float32.

    Raises:
        OpError: K is not a multiple of 64.
    """
    scales, token = token_scales_from_absmax(split_groups(x.float()).abs().amax(-1), clip)
    return encode_integer(x, scales, token), scales, token


def widen(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``scale · code``, exact: ``[..., K]`` int8 with scales ``[..., K/64]`` uint8 in 0..16 to ``[..., K]`` int8."""
    return (split_groups(codes) * scales[..., None].to(torch.int8)).reshape(codes.shape)


def dequantize_integer(
    codes: torch.Tensor, scales: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``outer · (scale · code)``: the inner product is exact, the outer one rounds once to ``dtype``.

    Args:
        codes: ``[..., K]`` int8.
        scales: ``[..., K/64]`` uint8.
        outer: ``[..., 1]`` float32.

    Returns:
        ``[..., K]`` of ``dtype``; a zero scale gives exactly 0 unless ``outer`` is NaN or inf.
    """
    return widen(codes, scales).to(dtype) * outer.to(dtype)


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
