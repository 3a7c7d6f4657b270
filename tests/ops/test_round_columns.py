"""round_columns: the reference against the formula, column by column, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from column_cases import make_columns, one_by_one
from omniw4 import ops
from omniw4.errors import OpError


@pytest.mark.parametrize("from_codes", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 200), (3, 65)])
def test_against_the_formula(batch: int, rows: int, from_codes: bool) -> None:
    values, coupling, known = make_columns(batch, rows, from_codes)
    wanted = one_by_one(values.double(), coupling.double(), None if known is None else known.double())
    codes, changes = ops.round_columns(values.clone(), coupling, known)
    same = (codes == wanted[0]).all(1)  # [B, N]: rows that met no tie on the way
    assert same.float().mean() > 0.98
    assert torch.equal(codes, codes.round().clamp(-8, 7))
    error = (changes - wanted[1]).abs().amax(1)
    assert error[same].max() < 1e-4


def test_without_coupling_every_column_is_on_its_own() -> None:
    values, coupling, known = make_columns(2, 33, True)
    codes, changes = ops.round_columns(values.clone(), torch.zeros_like(coupling), known)
    assert torch.equal(codes, values.round().clamp(-8, 7))
    assert known is not None
    assert torch.equal(changes, known - codes)


def test_the_diagonal_and_what_lies_below_it_do_nothing() -> None:
    values, coupling, _ = make_columns(2, 33, False)
    found = ops.round_columns(values.clone(), coupling, None)
    other = ops.round_columns(values.clone(), coupling.triu(1) + 100 * torch.ones(64, 64).tril(), None)
    assert torch.equal(found[0], other[0])
    assert torch.equal(found[1], other[1])


def test_no_rows() -> None:
    codes, changes = ops.round_columns(torch.empty(2, 64, 0), torch.zeros(2, 64, 64), None)
    assert codes.shape == changes.shape == (2, 64, 0)


@pytest.mark.parametrize(
    ("values", "coupling", "message"),
    [
        (torch.zeros(64, 3), torch.zeros(1, 64, 64), "2 dimensions"),
        (torch.zeros(1, 32, 3), torch.zeros(1, 64, 64), r"values has shape \[1, 32, 3\]"),
        (torch.zeros(2, 64, 3), torch.zeros(1, 64, 64), "coupling has shape"),
        (torch.zeros(1, 64, 3).half(), torch.zeros(1, 64, 64), "dtype float16"),
        (torch.zeros(1, 3, 64).transpose(1, 2), torch.zeros(1, 64, 64), "strides"),
    ],
)
def test_refused_by_name(values: torch.Tensor, coupling: torch.Tensor, message: str) -> None:
    with pytest.raises(OpError, match=f"round_columns: .*{message}"):
        ops.round_columns(values, coupling, None)


@pytest.mark.parametrize("from_codes", [False, True])
def test_registration(from_codes: bool) -> None:
    torch.library.opcheck(ops.round_columns, make_columns(2, 7, from_codes))
