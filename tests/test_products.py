"""Products by oneDNN: those of torch, for every layout of the operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from omniw4 import products

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "columns apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "transposed, rows apart": lambda x: torch.cat((x, x), -2).mT.contiguous().mT[..., : x.shape[-2], :],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_products_are_those_of_fp64(lead: tuple[int, ...], left: str, right: str) -> None:
    a, b = LAYOUTS[left](numbers(*lead, 5, 70, seed=0)), LAYOUTS[right](numbers(*lead, 70, 33, seed=1))
    wanted = a.double() @ b.double()
    torch.testing.assert_close(products.product(a, b).double(), wanted, rtol=1e-5, atol=1e-4)
    total = numbers(*lead, 5, 40, seed=2)[..., :33]
    expected = total.double() - 0.5 * wanted
    products.add_product_(total, a, b, -0.5)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, bias: bool) -> None:
    x, weight = numbers(2, 3, 64, seed=0).to(dtype), numbers(24, 64, seed=1).to(dtype)
    added = numbers(24, seed=2).to(dtype) if bias else None
    found = products.linear(x, weight, added)
    assert found.dtype == dtype
    torch.testing.assert_close(found, F.linear(x, weight, added), rtol=1e-5, atol=1e-4)


def test_nothing_times_nothing() -> None:
    assert products.product(torch.empty(0, 8), torch.ones(8, 3)).shape == (0, 3)
    assert not products.product(torch.empty(2, 0), torch.empty(0, 3)).any()
    assert products.linear(torch.empty(0, 8), torch.ones(3, 8), None).shape == (0, 3)


def test_gradients_flow() -> None:
    a = numbers(4, 8, seed=0).requires_grad_()
    products.product(a, numbers(8, 3, seed=1)).sum().backward()
    assert a.grad is not None
    weight = numbers(5, 8, seed=2).requires_grad_()
    products.linear(numbers(4, 8, seed=3), weight, None).sum().backward()
    assert weight.grad is not None


def test_onednn_is_used_where_it_is() -> None:
    """The op has no public name: a torch that renames it must not silently cost half of the speed."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert products._find_onednn() is not None


@pytest.mark.parametrize("right", LAYOUTS)
def test_operands_that_onednn_would_read_one_by_one_go_elsewhere(right: str) -> None:
    b = LAYOUTS[right](numbers(70, 33, seed=1))
    assert products._suits(numbers(5, 70, seed=0), b) == (right in ("contiguous", "transposed"))
