"""The low-rank branch: the best rank-R approximation of what the integer codes leave over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omniw4.quantize.order import columns_of, permute

OVERSAMPLING = 16  # vectors iterated besides the R wanted
ITERATIONS = 24
QUICK_ITERATIONS, BLOCKS = 5, 8
EXACT_SIZE = 1536  # columns of the largest Gram matrix that a CPU decomposes in full: some seconds
# Change of the energy held from one iteration to the next, of all energy. All blocks so far: each step gains about a
# tenth of what the step before did. The last block alone: FP32's rounding.
SETTLED, SETTLED_ALONE = 3e-5, 2e-7
SHIFTS = (1e-12, 0.0)  # of Cholesky QR, the first time and the second


@dataclass(frozen=True)
class LowRank:
    """``L = up·downᵀ`` as it is stored: both factors rounded to a 16-bit type."""

    up: torch.Tensor  # [..., N, R] float16 or bfloat16
    down: torch.Tensor  # [..., K, R] same dtype

    def product(self) -> torch.Tensor:
        """``[..., N, K]`` float32, from the rounded factors."""
        return self.up.float() @ self.down.float().transpose(-1, -2)

    def __getitem__(self, index: int | torch.Tensor) -> LowRank:
        return LowRank(self.up[index], self.down[index])

    @staticmethod
    def stack(parts: Sequence[LowRank | None]) -> LowRank | None:
        """Along a new leading axis; None when there are none."""
        there = [part for part in parts if part is not None]
        return LowRank(*(torch.stack([getattr(p, name) for p in there]) for name in ("up", "down"))) if there else None


@dataclass(frozen=True)
class Whitening:
    """A square root S of the inputs' second moments, ``S·Sᵀ = H``: what is small behind it is small in the outputs.

    Args:
        inverse: ``S⁻¹``: ``[..., K, K]`` upper triangular (:func:`omniw4.quantize.gptq.factorise`), or ``[..., K]``,
            its diagonal. H is damped there, so no direction is blown up on the way back, and none need be cut off.
        order: ``[..., K/64]`` of the groups, which the factor is in (:mod:`omniw4.quantize.order`): S is then a root
            of H between two permutations, and as good.
    """

    inverse: torch.Tensor
    diagonal: bool
    order: torch.Tensor | None = None

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """``W·S`` of ``[..., N, K]``, FP64."""
        inverse = self.inverse.double()
        if self.diagonal:
            return weight.double() / inverse[..., None, :]
        weight = weight if self.order is None else permute(weight, columns_of(self.order))
        return torch.linalg.solve_triangular(inverse, weight.double(), upper=True, left=False)

    def undo(self, down: torch.Tensor) -> torch.Tensor:
        """``[..., K, R]`` behind S, as it is without: ``S⁻ᵀ·down``."""
        inverse = self.inverse.to(down.dtype)
        if self.diagonal:
            return inverse[..., None] * down
        found = inverse.transpose(-1, -2) @ down
        if self.order is None:
            return found
        return permute(found.transpose(-1, -2), columns_of(self.order.argsort(-1))).transpose(-1, -2)


def svd_lowrank(residual: torch.Tensor, rank: int, dtype: torch.dtype, whitening: Whitening | None = None) -> LowRank:
    """Truncated singular value decomposition: the optimum of Eckart and Young, in the outputs with a whitening.

    A few products with a block of vectors find the leading singular vectors (:func:`quick_pairs`). Where that does not
    settle, or the matrix is small, they are the leading eigenvectors of the smaller Gram matrix in FP64 (which keeps
    half of FP64's digits of the small singular values, more than FP32 has): from all of them on a CPU up to
    :data:`EXACT_SIZE`, exact up to rounding; else by more iterations, where a full decomposition of each matrix would
    take a hundred times longer. Each factor gets the square root of the singular values, so that the entries of both
    lie in the middle of the range of 16-bit floats. A rank beyond min(N, K) adds zero columns.

    Args:
        residual: ``[..., N, K]`` float.
        rank: R, at least 1.
        dtype: float16 or bfloat16, what the factors are rounded to.
        whitening: of the inputs. The approximation then minimizes ``‖(residual - L)·S‖`` (as SVD-LLM does,
            arXiv 2403.07378) instead of ``‖residual - L‖``.
    """
    n, k = residual.shape[-2:]
    wide, kept = n <= k, min(rank, n, k)
    on_cpu, found = residual.device.type == "cpu", None
    if whitening is None:
        found = quick_pairs(residual.transpose(-1, -2) if wide else residual, kept, all_blocks=on_cpu)
    if found is None:
        r = residual.double() if whitening is None else whitening.apply(residual)
        tall = r.transpose(-1, -2) if wide else r
        gram = tall.transpose(-1, -2) @ tall
        exact = on_cpu and min(n, k) <= EXACT_SIZE
        values, leading = eigenpairs(gram, kept) if exact else subspace_iteration(gram, kept)
        found = values, leading, tall @ leading
    values, leading, image = found
    root = values.clamp(min=0).sqrt().sqrt()[..., None, :]  # √sigma: [..., 1, kept]
    inverse_root = torch.where(root > 0, root.reciprocal(), torch.zeros_like(root))
    mine, other = leading * root, image * inverse_root  # the image is sigma·(other vector)
    up, down = (mine, other) if wide else (other, mine)
    if whitening is not None:
        down = whitening.undo(down)
    return LowRank(_padded(up, rank).to(dtype), _padded(down, rank).to(dtype))


def eigenpairs(gram: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest eigenvalues ``[..., count]``, falling, and their vectors ``[..., n, count]``, of ``[..., n, n]``."""
    values, vectors = torch.linalg.eigh(gram)  # ascending
    return values[..., -count:].flip(-1), vectors[..., -count:].flip(-1)


def quick_pairs(
    tall: torch.Tensor, count: int, *, all_blocks: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """As :func:`eigenpairs` of ``tallᵀ·tall``, with the image ``tall·vectors``, by a few products in FP32 that need no
    Gram matrix.

    Args:
        tall: ``[..., M, n]`` float.
        count: of pairs, at most n.
        all_blocks: from all blocks of vectors so far (block Krylov; Musco and Musco, arXiv 1504.05477), which settles
            in fewer steps; or from the last one, for GPUs, where eigenproblems of many blocks take longer than steps.

    Returns:
        Values, vectors and images, FP64 and as precise as FP32. None where the energy that the vectors hold still
        grows by more than :data:`SETTLED` for any of the matrices: then the spectrum is too flat for this. And for a
        matrix so small that this would not be quicker.
    """
    n, width = tall.shape[-1], count + OVERSAMPLING
    if n < 4 * width:
        return None
    steps = min(BLOCKS, n // (2 * width)) if all_blocks else QUICK_ITERATIONS
    settled = SETTLED if all_blocks else SETTLED_ALONE
    largest = tall.abs().amax((-1, -2), keepdim=True)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = (tall / unit).float()  # squares stay within FP32's range
    transposed = scaled.transpose(-1, -2)
    total = scaled.square().sum((-1, -2), dtype=torch.float64)
    image = scaled @ _start(n, width, scaled)
    basis: torch.Tensor | None = None  # [..., n, width · steps so far], orthonormal
    images, before = image, None
    for _ in range(steps):
        block = (transposed @ image).double()
        for shift in SHIFTS:  # the second time takes out what rounding left of the basis
            if basis is not None and all_blocks:
                block -= (basis @ (basis.transpose(-1, -2) @ block.float())).double()
            block = cholesky_qr(block, shift)
        image = scaled @ block.float()
        if basis is not None and all_blocks:
            basis, images = torch.cat((basis, block.float()), -1), torch.cat((images, image), -1)
        else:
            basis, images = block.float(), image
        gram = (images.transpose(-1, -2) @ images).double()
        held = torch.linalg.eigvalsh(gram)[..., -count:].sum(-1)
        if before is not None and bool((held - before <= settled * total).all()):
            vectors = orthonormal(basis.double() @ eigenpairs(gram, count)[1])
            image = (scaled @ vectors.float()).double()
            values, mixing = eigenpairs(image.transpose(-1, -2) @ image, count)  # orthogonal images
            return values * unit[..., 0].double().square(), vectors @ mixing, image @ mixing * unit
        before = held
    return None


def subspace_iteration(gram: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`eigenpairs`, by orthogonal iteration with Rayleigh-Ritz at the end (Halko, Martinsson and Tropp,
    arXiv 0909.4061).

    What is lost is energy: eigenvalues just below the last one kept may be mixed in, which costs the difference of
    the two. Starts from a fixed random block, so the same matrix gives the same vectors.
    """
    n = gram.shape[-1]
    block = orthonormal(gram @ _start(n, min(n, count + OVERSAMPLING), gram))
    for _ in range(ITERATIONS):
        block = orthonormal(gram @ block)
    small = block.transpose(-1, -2) @ (gram @ block)
    values, mixing = eigenpairs((small + small.transpose(-1, -2)) / 2, count)
    return values, block @ mixing


def _start(n: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """``[n, width]`` random numbers, always the same, of the type and on the device of ``like``."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, width, dtype=like.dtype, generator=generator).to(like.device)


def orthonormal(block: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns ``[..., n, w]``: Cholesky QR twice, which batches, without reflections."""
    for shift in SHIFTS:
        block = cholesky_qr(block, shift)
    return block


def cholesky_qr(block: torch.Tensor, shift: float) -> torch.Tensor:
    """The columns ``[..., n, w]`` made orthonormal as far as their condition allows.

    Args:
        shift: share of the mean diagonal that is added before the factorisation, so that dependent columns (a matrix
            of lower rank than w) give small columns instead of a failure.
    """
    gram = block.transpose(-1, -2) @ block
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower = torch.linalg.cholesky_ex(gram + (shift * mean + 1e-280) * eye)[0]
    block = torch.linalg.solve_triangular(lower.transpose(-1, -2), block, upper=True, left=False)
    return torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0)


def energy_share(residual: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Share of the residual's squared Frobenius norm that is gone in ``rest``: ``[...]`` FP64, 0 for a zero residual.

    Args:
        residual, rest: ``[..., N, K]`` float.
    """
    total = residual.square().sum((-1, -2), dtype=torch.float64)
    left = rest.square().sum((-1, -2), dtype=torch.float64)
    return torch.where(total > 0, 1.0 - left / total.clamp(min=1e-300), torch.zeros_like(total))


def _padded(factor: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.nn.functional.pad(factor, (0, rank - factor.shape[-1]))
