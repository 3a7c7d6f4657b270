"""``round_columns``: the columns of one group become codes one after another, each making up for those before it.

The sequential core of GPTQ and of coordinate descent (:mod:`omniw4.quantize`), in units of a row's step.

Contract
    For each row n of each b, column after column j = 0..63::

        code_j    = clamp(rint(value_j), -8, 7)
        change_j  = (known_j, or without known value_j) - code_j
        value_i  += coupling[j, i] · change_j            for i > j

    =========  ===========================================================================
    values     [B, 64, N] float32, contiguous; consumed
    coupling   [B, 64, 64] float32; what lies on the diagonal and below is not looked at
    known      [B, 64, N] float32 or None
    returns    codes [B, 64, N] float32, whole numbers, and changes [B, 64, N] float32
    =========  ===========================================================================

    Exact but for the order of the sums. The kernel follows the formula, product and sum each rounded to FP32: its bits
    are those of the formula in torch, on any device, and a row's never depend on the other rows. The reference adds
    what sixteen columns bring in one matrix product, which takes a third of the time, in an order that the BLAS
    chooses: where a value then lies on the other side of a tie, its code and what follows from it differ.

    Errors: OpError for a wrong shape, dtype, layout or device.

Source: Frantar et al., GPTQ, arXiv 2210.17323, with the lazy updates of its algorithm 1 inside a group as well.
"""

from __future__ import annotations

import torch

from omniw4 import int4
from omniw4.ops.checks import require, require_dtype, require_same_device, require_shape

_OP = "round_columns"
_LAZY = 16  # columns whose changes reach the columns behind them in one product
SIZE = int4.GROUP_SIZE


def check_round_columns(values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None) -> None:
    require(values.dim() == 3, _OP, f"values has {values.dim()} dimensions {list(values.shape)}, wanted [B, {SIZE}, N]")
    batch, _, rows = values.shape
    for name, tensor, shape in (
        ("values", values, (batch, SIZE, rows)),
        ("coupling", coupling, (batch, SIZE, SIZE)),
        ("known", known, (batch, SIZE, rows)),
    ):
        if tensor is not None:
            require_shape(_OP, name, tensor, shape)
            require_dtype(_OP, name, tensor, torch.float32)
    require(values.is_contiguous(), _OP, f"values has strides {values.stride()}, wanted contiguous")
    require_same_device(_OP, values, coupling=coupling, known=known)


def round_columns_ref(
    values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract in plain torch."""
    check_round_columns(values, coupling, known)
    codes, changes = torch.empty_like(values), torch.empty_like(values)
    columns, rounded, differences = values.split(1, 1), codes.split(1, 1), changes.split(1, 1)  # [B, 1, N] each
    before = columns if known is None else known.split(1, 1)
    onward = coupling.unsqueeze(-1).unbind(1)  # [B, 64, 1]: from each column to all
    across = coupling.transpose(1, 2)
    for left in range(0, SIZE, _LAZY):
        right = left + _LAZY
        for j in range(left, right):
            torch.round(columns[j], out=rounded[j]).clamp_(int4.INT4_MIN, int4.INT4_MAX)
            torch.sub(before[j], rounded[j], out=differences[j])
            rest = right - j - 1
            if rest:
                values.narrow(1, j + 1, rest).addcmul_(onward[j].narrow(1, j + 1, rest), differences[j])
        if right < SIZE:
            values[:, right:].baddbmm_(across[:, right:, left:right], changes[:, left:right])
    return codes, changes


@torch.library.custom_op("omniw4::round_columns", mutates_args=("values",))
def round_columns(
    values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return round_columns_ref(values, coupling, known)


@round_columns.register_fake
def _(values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(values)
