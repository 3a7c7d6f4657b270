"""The low-rank branch: the best rank-R approximation of what the integer codes leave over."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """``L = up·downᵀ`` as it is stored: both factors rounded to a 16-bit type."""

    up: torch.Tensor  # [N, R] float16 or bfloat16
    down: torch.Tensor  # [K, R] same dtype

    def product(self) -> torch.Tensor:
        """``[N, K]`` float32, from the rounded factors."""
        return self.up.float() @ self.down.float().T


def svd_lowrank(residual: torch.Tensor, rank: int, dtype: torch.dtype) -> LowRank:
    """Truncated singular value decomposition, exact up to rounding: the optimum of Eckart and Young.

    Takes the leading eigenvectors of the smaller Gram matrix in FP64 (which keeps half of FP64's digits of the small
    singular values, more than FP32 has). Each factor gets the square root of the singular values, so that the
    entries of both lie in the middle of the range of 16-bit floats. A rank beyond min(N, K) adds zero columns.

    Args:
        residual: ``[N, K]`` float.
        rank: R, at least 1.
        dtype: float16 or bfloat16, what the factors are rounded to.
    """
    n, k = residual.shape
    r = residual.double()
    wide = n <= k
    eigenvalues, vectors = torch.linalg.eigh(r @ r.T if wide else r.T @ r)  # ascending
    kept = min(rank, n, k)
    sigma = eigenvalues[-kept:].flip(0).clamp(min=0).sqrt()  # [kept]
    leading = vectors[:, -kept:].flip(1)  # [min(N, K), kept]
    root = sigma.sqrt()
    inverse_root = torch.where(root > 0, root.reciprocal(), torch.zeros_like(root))
    mine = leading * root
    other = (r.T @ leading if wide else r @ leading) * inverse_root  # sigma·(other vector)/√sigma
    up, down = (mine, other) if wide else (other, mine)
    return LowRank(_padded(up, rank).to(dtype), _padded(down, rank).to(dtype))


def energy_share(residual: torch.Tensor, rest: torch.Tensor) -> float:
    """Share of the residual's squared Frobenius norm that is gone in ``rest``; 0 for a zero residual."""
    total = float(residual.square().sum(dtype=torch.float64))
    return 1.0 - float(rest.square().sum(dtype=torch.float64)) / total if total > 0 else 0.0


def _padded(factor: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.nn.functional.pad(factor, (0, rank - factor.shape[1]))
