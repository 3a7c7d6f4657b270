"""Matrix product in which a row's result does not depend on the rows beside it."""

from __future__ import annotations

import torch

TILE = 64


def matmul_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a · b``, each row with the bits it would have alone.

    BLAS picks another kernel, and with it another order of summation, for another number of rows. So all products
    are done in tiles of exactly 64 rows, the last one filled with zeros: the shape BLAS sees is always the same, and
    within one shape every row is summed in the same order. Costs about a quarter more than one large product.

    Args:
        a: ``[M, K]`` float32 or float64.
        b: ``[K, N]`` of the same dtype.

    Returns:
        ``[M, N]``.
    """
    tokens, width = a.shape
    tiles = -(-tokens // TILE)
    if tiles * TILE == tokens:
        padded = a.contiguous()
    else:
        padded = a.new_zeros(tiles * TILE, width)
        padded[:tokens] = a
    out = padded.new_empty(tiles * TILE, b.shape[1])
    for start in range(0, tiles * TILE, TILE):
        torch.mm(padded[start : start + TILE], b, out=out[start : start + TILE])
    return out[:tokens]
