"""The groups of 64 columns that GPTQ and coordinate descent take one column after another."""

from __future__ import annotations

import torch

from omniw4 import int4, ops


def round_columns(
    values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of that name (:mod:`omniw4.ops.round_columns`) with any leading axes: codes and changes of ``values``.

    Args:
        values: ``[..., 64, N]`` float32, contiguous, consumed.
        coupling: ``[..., 64, 64]`` float32.
        known: ``[..., 64, N]`` float32: what codes are taken from in place of the values.
    """
    flat = None if known is None else known.reshape(-1, *known.shape[-2:])
    found = ops.round_columns(values.view(-1, *values.shape[-2:]), coupling.reshape(-1, *coupling.shape[-2:]), flat)
    return found[0].view(values.shape), found[1].view(values.shape)


def diagonal_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Those of 64 by 64 along the diagonal of ``[..., K, K]``: a new ``[..., K/64, 64, 64]``."""
    size = int4.GROUP_SIZE
    tiles = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., K/64, 64, K/64, 64]
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).clone(memory_format=torch.contiguous_format)
