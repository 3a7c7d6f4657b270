"""Checks of tensor arguments that the ops share. Each raises OpError naming the op, the argument, found and wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniw4.errors import OpError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def require(condition: bool, op: str, what: str, *, hint: str = "") -> None:
    if not condition:
        raise OpError(f"{op}: {what}", hint=hint)


def require_shape(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    found, wanted = list(tensor.shape), list(shape)
    if found != wanted:
        raise OpError(f"{op}: {name} has shape {found}, wanted {wanted}")


def require_dtype(op: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(_name(d) for d in dtypes)
        raise OpError(f"{op}: {name} has dtype {_name(tensor.dtype)}, wanted {wanted}")


def require_activations(op: str, name: str, x: torch.Tensor) -> None:
    """``[M, K]`` float16 or bfloat16, on a CPU float32 too."""
    if x.dim() != 2:
        raise OpError(f"{op}: {name} has {x.dim()} dimensions {list(x.shape)}, wanted two, [tokens, features]")
    require_dtype(op, name, x, *(HALVES if x.is_cuda else FLOATS))


def require_same_device(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise OpError(f"{op}: {name} is on {tensor.device}, the input is on {x.device}")


def require_act_bits(op: str, act_bits: int) -> None:
    if act_bits not in (4, 8, 16):
        raise OpError(f"{op}: act_bits is {act_bits}, wanted 4, 8 or 16")


def require_scale_type(op: str, scale_type: str) -> None:
    if scale_type not in ("float16", "integer"):
        raise OpError(f"{op}: scale_type is {scale_type!r}, wanted 'float16' or 'integer'")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
