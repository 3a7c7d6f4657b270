"""The low-rank branch: the optimum of Eckart and Young, stored in 16 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from quantize_problems import weights

from omniw4.quantize import lowrank
from omniw4.quantize.lowrank import (
    Whitening,
    eigenpairs,
    energy_share,
    quick_pairs,
    subspace_iteration,
    svd_lowrank,
)

SHAPES = [(96, 160), (160, 96), (64, 64), (8, 192)]


def optimum(residual: torch.Tensor, rank: int) -> float:
    """Eckart-Young: the squared singular values past the rank."""
    return float(torch.linalg.svdvals(residual.double())[rank:].square().sum())


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rank", [1, 7, 16, 64])
def test_error_is_the_optimum_up_to_16_bit_rounding(n: int, k: int, rank: int) -> None:
    residual = weights(n, k)
    low = svd_lowrank(residual, rank, torch.float16)
    error = float((residual - low.product()).double().square().sum())
    total = float(residual.double().square().sum())
    assert low.up.shape == (n, rank)
    assert low.down.shape == (k, rank)
    assert error >= optimum(residual, rank) - 1e-9 * total
    assert error <= optimum(residual, rank) + 1e-6 * total


def test_bfloat16_costs_its_rounding_and_no_more() -> None:
    residual = weights(96, 160)
    low = svd_lowrank(residual, 16, torch.bfloat16)
    error = float((residual - low.product()).double().square().sum())
    assert low.up.dtype == low.down.dtype == torch.bfloat16
    assert error <= optimum(residual, 16) * 1.001


@pytest.mark.parametrize("rank", [65, 256])
def test_rank_beyond_the_matrix_adds_zero_columns(rank: int) -> None:
    residual = weights(64, 128)
    low = svd_lowrank(residual, rank, torch.float16)
    assert low.up.shape == (64, rank)
    assert not low.up[:, 64:].any()
    assert not low.down[:, 64:].any()
    torch.testing.assert_close(low.product(), residual, rtol=0, atol=2e-4)


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 1e4])
def test_factors_are_balanced_and_stay_in_the_range_of_fp16(scale: float) -> None:
    residual = weights(96, 160, std=scale)
    low = svd_lowrank(residual, 16, torch.float16)
    assert torch.isfinite(low.up).all()
    assert torch.isfinite(low.down).all()
    torch.testing.assert_close(low.up.double().norm(dim=0), low.down.double().norm(dim=0), rtol=1e-2, atol=1e-5)
    error = float((residual - low.product()).double().square().sum())
    assert error <= optimum(residual, 16) * 1.01


def test_a_matrix_of_low_rank_is_kept_whole_and_a_zero_one_is_zero() -> None:
    g = torch.Generator().manual_seed(0)
    residual = torch.randn(80, 3, generator=g) @ torch.randn(3, 128, generator=g)
    low = svd_lowrank(residual, 16, torch.float16)
    assert energy_share(residual, residual - low.product()) > 0.999999
    nothing = svd_lowrank(torch.zeros(80, 128), 16, torch.float16)
    assert not nothing.up.any()
    assert not nothing.down.any()


def test_energy_share_is_measured() -> None:
    residual = weights(96, 160)
    share = energy_share(residual, residual - svd_lowrank(residual, 16, torch.float16).product())
    total = float(residual.double().square().sum())
    assert share == pytest.approx(1 - optimum(residual, 16) / total, abs=1e-4)
    assert energy_share(torch.zeros(4, 4), torch.zeros(4, 4)) == 0.0


def test_the_same_matrix_gives_the_same_bytes() -> None:
    first, second = (svd_lowrank(weights(96, 160), 16, torch.float16) for _ in range(2))
    assert torch.equal(first.up, second.up)
    assert torch.equal(first.down, second.down)


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (256, 320)])
@pytest.mark.parametrize("rank", [1, 8, 16])
def test_subspace_iteration_holds_the_energy_of_the_optimum(n: int, k: int, rank: int) -> None:
    """Of pure noise, whose eigenvalues lie closest together, it may lose a thousandth."""
    residual = weights(n, k).double()
    gram = residual @ residual.T
    values, vectors = subspace_iteration(gram, min(rank, n))
    wanted, _ = eigenpairs(gram, min(rank, n))
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(values), dtype=torch.float64), rtol=0, atol=1e-9)
    held = float((vectors.T @ gram @ vectors).trace())
    assert held <= float(wanted.sum()) * (1 + 1e-9)
    assert held >= float(wanted.sum()) * (1 - 1e-3)
    assert bool((values.diff() <= 0).all())


@pytest.mark.parametrize("true_rank", [0, 3])
def test_subspace_iteration_of_a_matrix_of_low_rank(true_rank: int) -> None:
    residual = (weights(64, true_rank) @ weights(true_rank, 96)).double() if true_rank else torch.zeros(64, 96).double()
    gram = residual @ residual.T
    values, vectors = subspace_iteration(gram[None].expand(2, 64, 64), 8)
    assert bool(torch.isfinite(vectors).all())
    torch.testing.assert_close(values[0], eigenpairs(gram, 8)[0], rtol=1e-6, atol=1e-6 * float(gram.trace() + 1))
    assert torch.equal(values[0], values[1])


def spiked(n: int, k: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Noise with ``rank`` directions that stand out of it, as W - Q does in a round that began with the SVD of W."""
    return weights(n, k, seed=seed) * 0.05 + weights(n, rank, seed=seed + 1) @ weights(rank, k, seed=seed + 2)


@pytest.mark.parametrize("all_blocks", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize(("n", "k"), [(320, 400), (400, 320)])
def test_directions_that_stand_out_settle_at_once(n: int, k: int, scale: float, all_blocks: bool) -> None:
    residual = spiked(n, k, 16).double() * scale
    tall = residual.T if n <= k else residual
    found = quick_pairs(tall, 16, all_blocks=all_blocks)
    assert found is not None
    values, vectors, image = found
    torch.testing.assert_close(image, tall @ vectors, rtol=1e-4, atol=1e-5 * float(values.max().sqrt()))
    wanted, _ = eigenpairs(tall.T @ tall, 16)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-9)
    held = float((tall @ vectors).square().sum())
    assert held == pytest.approx(float(wanted.sum()), rel=1e-6)


@pytest.mark.parametrize("all_blocks", [True, False])
def test_a_flat_spectrum_does_not_settle(all_blocks: bool) -> None:
    flat, sharp = weights(400, 320).double(), spiked(400, 320, 16).double()
    quick = partial(quick_pairs, count=16, all_blocks=all_blocks)
    assert quick(flat) is None
    assert quick(torch.stack([sharp, flat])) is None, "one of a batch that does not is enough"
    assert quick(torch.zeros(400, 320).double()) is not None
    assert quick(weights(40, 40).double()) is None, "small ones are decomposed in full"


def test_all_blocks_settle_where_the_last_alone_does_not() -> None:
    """A spectrum that falls slowly, as that of W does: almost nothing is lost of the optimum."""
    u, v = (torch.linalg.qr(weights(n, 600, seed=n).double())[0] for n in (900, 600))
    falling = u @ torch.diag(torch.linspace(1, 0.05, 600, dtype=torch.float64) ** 8) @ v
    found = quick_pairs(falling, 16, all_blocks=True)
    assert quick_pairs(falling, 16, all_blocks=False) is None
    assert found is not None
    held = float((falling @ found[1]).square().sum())
    wanted, total = float(eigenpairs(falling.T @ falling, 16)[0].sum()), float(falling.square().sum())
    assert wanted - 5e-6 * total <= held <= wanted * (1 + 1e-9)


def test_a_large_matrix_is_not_decomposed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "EXACT_SIZE", 300)
    sizes = []
    exact = eigenpairs

    def noted(gram: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(gram.shape[-1])
        return exact(gram, count)

    monkeypatch.setattr(lowrank, "eigenpairs", noted)
    residual = weights(320, 400)
    low = svd_lowrank(residual, 16, torch.float16)
    assert max(sizes) <= 160, "half of the columns"
    total = float(residual.double().square().sum())
    best = total - optimum(residual, 16)
    assert energy_share(residual, residual - low.product()) * total > best * (1 - 1e-3)


def test_a_stack_is_fitted_matrix_by_matrix() -> None:
    stack = torch.stack([weights(48, 64, seed=seed) for seed in range(3)])
    together = svd_lowrank(stack, 8, torch.float16)
    for index, residual in enumerate(stack):
        alone = svd_lowrank(residual, 8, torch.float16)
        torch.testing.assert_close(together[index].product(), alone.product(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_whitened_branch_is_the_optimum_in_the_outputs(n: int, k: int, diagonal: bool) -> None:
    residual = weights(n, k)
    x = torch.randn(4 * k, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    x = x * torch.linspace(0.05, 4, k, dtype=torch.float64)
    hessian = x.T @ x / len(x) + 0.01 * torch.eye(k, dtype=torch.float64)
    if diagonal:
        hessian = hessian.diagonal().diag()
    inverse = torch.linalg.inv(hessian)
    upper = torch.linalg.cholesky(inverse, upper=True)
    whitening = Whitening(upper.diagonal() if diagonal else upper, diagonal=diagonal)
    root = torch.linalg.cholesky(hessian)
    wanted = optimum(residual.double() @ root, 8)

    def error(low: torch.Tensor) -> float:
        return float(((residual - low).double() @ root).square().sum())

    found = error(svd_lowrank(residual, 8, torch.float16, whitening).product())
    total = error(torch.zeros_like(residual))
    assert wanted - 1e-9 * total <= found <= wanted + 1e-5 * total
    if n > 8:
        assert found < 0.95 * error(svd_lowrank(residual, 8, torch.float16).product())
