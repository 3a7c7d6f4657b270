"""round_columns on a CPU, its kernel emulated: the bits of the formula. What only a GPU shows is in tests/kernels."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import build_emulation as build
import pytest
import torch

from column_cases import make_columns, one_by_one
from problems import assert_same

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
OK, BAD_SHAPE, MISALIGNED, MISSING = 0, 1, 2, 3  # enum class Status


@cache
def emulated() -> ModuleType:
    return build.load("emulated_columns")


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def run(values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and changes as the kernel leaves them, over memory full of other things."""
    codes, changes = (torch.full(values.shape, float("nan")) for _ in range(2))
    batch, _, rows = values.shape
    status = emulated().round_columns(
        address(values), address(coupling), address(known), address(codes), address(changes), batch, rows
    )
    assert status == OK
    return codes, changes


@pytest.mark.parametrize("from_codes", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 64), (2, 65), (3, 130)])
def test_the_bits_of_the_formula(batch: int, rows: int, from_codes: bool) -> None:
    case = make_columns(batch, rows, from_codes)
    given = case[0].clone()
    found, wanted = run(*case), one_by_one(*case)
    assert_same(found[0], wanted[0], "codes")
    assert_same(found[1], wanted[1], "changes")
    assert_same(case[0], given, "values, which the kernel only reads")


def test_codes_may_be_replaced_in_place() -> None:
    values, coupling, known = make_columns(2, 70, True)
    wanted = run(values, coupling, known)
    changes = torch.empty_like(values)
    assert (
        emulated().round_columns(
            address(values), address(coupling), address(known), address(known), address(changes), 2, 70
        )
        == OK
    )
    assert known is not None
    assert_same(known, wanted[0], "codes")
    assert_same(changes, wanted[1], "changes")


def test_the_launcher_refuses() -> None:
    values, coupling, _ = make_columns(1, 8, False)
    arguments = [address(values), address(coupling), 0, address(values), address(values), 1, 8]
    for index, wrong, status in (
        (5, -1, BAD_SHAPE), (5, 65536, BAD_SHAPE), (6, -1, BAD_SHAPE), (0, 0, MISSING), (1, 0, MISSING),
        (3, 0, MISSING), (4, 0, MISSING), (1, address(coupling) + 4, MISALIGNED), (6, 0, OK), (5, 0, OK),
    ):  # fmt: skip
        changed = [wrong if i == index else argument for i, argument in enumerate(arguments)]
        assert emulated().round_columns(*changed) == status, (index, wrong)
