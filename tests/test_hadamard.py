"""H64: against its definition, and its algebra."""

from __future__ import annotations

import pytest
import torch

from omniw4.errors import OpError
from omniw4.hadamard import hadamard64


def sylvester() -> torch.Tensor:
    """H64 by the definition: H[i, j] = (-1)^popcount(i & j) / 8, in FP64."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    return torch.tensor(signs, dtype=torch.float64) / 8


def test_unit_vectors_give_the_rows_of_the_matrix() -> None:
    assert torch.equal(hadamard64(torch.eye(64)).double(), sylvester())
    assert torch.equal(sylvester() @ sylvester(), torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 192), (2, 1024), (0, 128)])
def test_block_diagonal_product(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = (x.reshape(-1, 64) @ sylvester()).reshape(shape)
    assert torch.allclose(hadamard64(x), wanted, rtol=0, atol=1e-14)
    assert torch.allclose(hadamard64(x.float()).double(), wanted, rtol=0, atol=2e-6)


def test_its_own_inverse_and_norm_preserving() -> None:
    x = torch.randn(7, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(hadamard64(hadamard64(x)), x, atol=1e-14)
    assert torch.allclose(hadamard64(x).norm(dim=-1), x.norm(dim=-1), atol=1e-12)


def test_small_integers_are_exact() -> None:
    """Sums of 64 integers need no rounding: any order gives these bits, so any other bits are a wrong matrix."""
    x = torch.randint(-1000, 1000, (9, 128), generator=torch.Generator().manual_seed(3)).float()
    wanted = (x.double().reshape(-1, 64) @ (8 * sylvester())).reshape(9, 128) / 8
    assert torch.equal(hadamard64(x).double(), wanted)


def test_the_summation_order_is_the_documented_one() -> None:
    """Strides 1, 2, 4, 8, 16, 32, then 1/8: spelled out in scalar arithmetic, to the bit."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(4)) * 1000
    y = [v.clone() for v in x]
    stride = 1
    while stride < 64:
        for i in range(64):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
        stride *= 2
    assert torch.equal(hadamard64(x), torch.stack(y) * 0.125)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    y = hadamard64(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, hadamard64(x.float()))


def test_strided_input() -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(6)).T
    assert torch.equal(hadamard64(x), hadamard64(x.contiguous()))


@pytest.mark.parametrize("width", [1, 32, 100])
def test_refuses_other_widths(width: int) -> None:
    with pytest.raises(OpError, match="multiple of 64"):
        hadamard64(torch.zeros(2, width))
