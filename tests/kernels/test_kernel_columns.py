"""round_columns on a GPU: the bits of the formula, whatever the strides."""

from __future__ import annotations

import pytest
import torch

from column_cases import make_columns, one_by_one
from omniw4 import ops
from problems import assert_same

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("from_codes", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 64), (3, 65), (30, 960), (2, 8193), (1, 100_000)])
def test_the_bits_of_the_formula(batch: int, rows: int, from_codes: bool) -> None:
    case = make_columns(batch, rows, from_codes, DEVICE)
    wanted, given = one_by_one(*case), case[0].clone()
    for _ in range(3):
        found = ops.round_columns(*case)
        assert_same(found[0], wanted[0], "codes")
        assert_same(found[1], wanted[1], "changes")
    assert_same(case[0], given, "values, which the kernel only reads")


@pytest.mark.parametrize("from_codes", [False, True])
def test_views_and_no_rows(from_codes: bool) -> None:
    values, coupling, known = make_columns(3, 70, from_codes, DEVICE)
    wanted = ops.round_columns(values, coupling, known)
    apart = torch.zeros(3, 65, 67, device=DEVICE)[:, 1:, 3:]
    apart.copy_(coupling)
    turned = None if known is None else known.transpose(1, 2).contiguous().transpose(1, 2)
    for found, bits in zip(ops.round_columns(values, apart, turned), wanted, strict=True):
        assert_same(found, bits, "rows apart")
    assert ops.round_columns(values[..., :0].contiguous(), coupling, None)[0].shape == (3, 64, 0)
