"""The order in which GPTQ takes the groups: as they lie, or those with the largest inputs first.

What is rounded first is made up for by all columns that come after it, what is rounded last by none; so the columns
whose errors cost the most should go first (GPTQ's reference code calls it act-order). A group of 64 columns shares a
scale and stays whole, and its columns go back to where they were: the order changes codes, never their layout. It
belongs to the Hessian, so linears that read one input share it, and each of a batch of inputs has its own.
"""

from __future__ import annotations

import torch

from omniw4 import int4


def activation_order(hessian: torch.Tensor) -> torch.Tensor:
    """The groups by falling sum of the Hessian's diagonal, the energy of their inputs; of equal ones the first first.

    A rotation within the groups leaves the sums as they are.

    Args:
        hessian: ``[..., K, K]``, K a multiple of 64.

    Returns:
        ``[..., K/64]`` int64: place by place the index of a group.
    """
    energy = int4.split_groups(hessian.diagonal(dim1=-2, dim2=-1)).sum(-1)  # [..., K/64]
    return energy.sort(dim=-1, descending=True, stable=True).indices


def columns_of(order: torch.Tensor) -> torch.Tensor:
    """``[..., K/64]`` groups to the columns they consist of, ``[..., K]``."""
    inside = torch.arange(int4.GROUP_SIZE, device=order.device)
    return (order[..., None] * int4.GROUP_SIZE + inside).flatten(-2)


def permute(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``tensor[..., indices]`` along the last axis of ``[..., N, K]``, each of the batch with its own ``[..., K]``."""
    return tensor.gather(-1, indices[..., None, :].expand(tensor.shape))


def permute_hessian(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows and columns of ``[..., K, K]`` in the order ``[..., K/64]`` of their groups."""
    columns = columns_of(order)
    return permute(permute(hessian, columns).transpose(-1, -2), columns).transpose(-1, -2)
