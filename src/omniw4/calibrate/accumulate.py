"""Second moments of a linear's input, accumulated batch by batch."""

from __future__ import annotations

import torch

from omniw4.products import add_product_
from omniw4.tensors import LinearStats

_PANEL = 128  # columns a panel: wide enough for a fast GEMM, narrow enough to skip most of the lower triangle


class Accumulator:
    """Running sums over the counted rows of one input: Hessian, its RMS-normalised twin, absmax.

    Only the upper triangles are computed; :meth:`finish` mirrors them. Sums are FP32 whatever the model's dtype.

    Args:
        width: in_features K.
        device: where the sums live.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.hessian = torch.zeros(width, width, device=device)
        self.hessian_normalized = torch.zeros(width, width, device=device)
        self.absmax = torch.zeros(width, device=device)
        self.tokens = 0
        self.excluded = 0

    def add(self, x: torch.Tensor) -> None:
        """Add rows ``x`` [T, K] float. Rows that hold NaN or inf are left out and counted in ``excluded``."""
        x = x.float()
        norm = torch.linalg.vector_norm(x, dim=1)  # [T]; NaN or inf exactly where the row is not finite
        finite = torch.isfinite(norm)
        count = int(finite.sum())
        if count < x.shape[0]:
            x, norm = x[finite], norm[finite]
            self.excluded += finite.numel() - count
        if count == 0:
            return
        self.tokens += count
        columns = x.T.contiguous()  # [K, T]
        self.absmax = torch.maximum(self.absmax, columns.abs().amax(1))
        add_gram(self.hessian, columns)
        scale = x.shape[1] ** 0.5 / norm  # 1 / RMS of the row
        add_gram(self.hessian_normalized, columns * scale.masked_fill(norm == 0, 0.0))

    def finish(self) -> LinearStats:
        """Means over the counted rows, as full symmetric matrices."""
        count = max(self.tokens, 1)
        hessian = mirror_(self.hessian / count)
        return LinearStats(
            hessian=hessian,
            hessian_normalized=mirror_(self.hessian_normalized / count),
            absmax=self.absmax,
            rms=hessian.diagonal().sqrt(),
            tokens=self.tokens,
            excluded=self.excluded,
        )


def add_gram(total: torch.Tensor, columns: torch.Tensor) -> None:
    """``total += columns·columnsᵀ`` in the upper triangle, in place; what lies below the diagonal blocks is left alone.

    Args:
        total: ``[K, K]`` float32.
        columns: ``[K, T]`` float32, contiguous.
    """
    for start in range(0, len(columns), _PANEL):
        end = start + _PANEL
        add_product_(total[start:end, start:], columns[start:end], columns[start:].T)


def mirror_(matrix: torch.Tensor) -> torch.Tensor:
    """Write the upper triangle of ``[K, K]`` over the lower one; returns the matrix."""
    for start in range(0, len(matrix), _PANEL):
        end = start + _PANEL
        matrix[end:, start:end] = matrix[start:end, end:].T
        block = matrix[start:end, start:end]
        block.copy_(block.triu() + block.triu(1).T)
    return matrix
