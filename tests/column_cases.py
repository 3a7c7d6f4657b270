"""Groups of columns to round, and the formula they are held to."""

from __future__ import annotations

import torch


def make_columns(
    batch: int, rows: int, from_codes: bool, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values over the whole grid and a little beyond, a coupling as strong as a real Hessian's, and codes or None."""
    g = torch.Generator().manual_seed(batch * 1000 + rows)
    values = torch.randn(batch, 64, rows, generator=g) * 4
    coupling = torch.randn(batch, 64, 64, generator=g) * 0.15
    known = torch.randint(-8, 8, (batch, 64, rows), generator=g).float() if from_codes else None
    return values.to(device), coupling.to(device), None if known is None else known.to(device)


def one_by_one(
    values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of ``ops.round_columns`` as it is written: every product and every sum an operation of its own."""
    values = values.clone()
    codes, changes = torch.empty_like(values), torch.empty_like(values)
    for j in range(values.shape[1]):
        codes[:, j] = values[:, j].round().clamp(-8, 7)
        changes[:, j] = (values if known is None else known)[:, j] - codes[:, j]
        for i in range(j + 1, values.shape[1]):
            product = coupling[:, j, i, None] * changes[:, j]
            values[:, i] = values[:, i] + product
    return codes, changes
