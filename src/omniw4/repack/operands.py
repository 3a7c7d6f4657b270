"""What every layout does alike: check the linear it is given, carry the tensors that keep their order, check and cut
the padding on the way back."""

from __future__ import annotations

import torch

from omniw4.errors import LayoutError
from omniw4.int4 import GROUP_SIZE
from omniw4.repack.axes import pad, round_up
from omniw4.tensors import LinearSpec, QuantizedLinear

RANK_TILE = 16  # k of mma.m16n8k16, which multiplies the low-rank branch


def check_linear(linear: QuantizedLinear) -> None:
    """Refuse a linear whose tensors do not fit together, before any of them is moved.

    Raises:
        LayoutError: naming the tensor, its shape or dtype, and the one wanted.
    """
    if linear.qweight.dim() != 2:
        raise LayoutError(f"qweight has shape {list(linear.qweight.shape)}, wanted [N, K/2]")
    n, k, rank = linear.out_features, linear.in_features, linear.spec.rank
    if k % GROUP_SIZE:
        raise LayoutError(f"in_features {k} is not a multiple of {GROUP_SIZE}")
    wanted = {
        "qweight": (n, k // 2),
        "w_scales": (n, k // GROUP_SIZE),
        "row_scales": (n,),
        "proj_down": (k, rank),
        "proj_up": (n, rank),
        "smooth": (k,),
        "bias": (n,),
    }
    tensors = linear.tensors()
    for name, tensor in tensors.items():
        check_shape(name, tensor, wanted[name])
    integer = linear.spec.scale_type == "integer"
    if ("row_scales" in tensors) != integer:
        found = "is there" if "row_scales" in tensors else "is missing"
        raise LayoutError(f"row_scales {found} although the scale type is {linear.spec.scale_type}")
    check_dtype("qweight", tensors["qweight"], torch.uint8)
    check_dtype("w_scales", tensors["w_scales"], torch.uint8 if integer else torch.float16)
    if integer:
        check_dtype("row_scales", tensors["row_scales"], torch.float32)
    for name in ("proj_down", "proj_up"):
        if (name in tensors) != (rank > 0):
            found = "is there" if name in tensors else "is missing"
            raise LayoutError(f"{name} {found} although the rank is {rank}")


def check_shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """Raises LayoutError naming the tensor, the shape found and the shape wanted."""
    if tuple(tensor.shape) != wanted:
        raise LayoutError(f"{name} has shape {list(tensor.shape)}, wanted {list(wanted)}")


def check_dtype(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> None:
    """Raises LayoutError naming the tensor, the dtype found and the dtype wanted."""
    if tensor.dtype != wanted:
        raise LayoutError(f"{name} has dtype {tensor.dtype}, wanted {wanted}")


def take(packed: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of that name, checked; raises LayoutError when it is missing or not as wanted."""
    if name not in packed:
        raise LayoutError(f"{name} is missing from the packed tensors, found {sorted(packed)}")
    check_shape(name, packed[name], shape)
    check_dtype(name, packed[name], dtype)
    return packed[name]


def cut(name: str, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Inverse of :func:`omniw4.repack.axes.pad`: the first ``length`` along ``dim``.

    Raises:
        LayoutError: the padding that is cut off is not zero, so the tensor is damaged or of another shape.
    """
    padding = x.narrow(dim, length, x.shape[dim] - length)
    if torch.any(padding != 0):
        raise LayoutError(f"{name} has non-zero padding past {length} along dimension {dim}")
    return x.narrow(dim, 0, length).contiguous()


def pack_rest(linear: QuantizedLinear, n_tile: int) -> dict[str, torch.Tensor]:
    """The tensors that keep their row-major order, padded with zeros to whole tiles.

    Returns:
        those present of ``proj_down [K, R']``, ``proj_up [N', R']``, ``smooth [K]``, ``bias [N']``, with N' = N
        rounded up to ``n_tile`` and R' = R rounded up to 16. Where nothing is padded they share the input's memory.
    """
    n = round_up(linear.out_features, n_tile)
    rank = round_up(linear.spec.rank, RANK_TILE)
    rest: dict[str, torch.Tensor] = {}
    if linear.proj_down is not None and linear.proj_up is not None:
        rest["proj_down"] = pad(linear.proj_down, 1, rank)
        rest["proj_up"] = pad(pad(linear.proj_up, 1, rank), 0, n)
    if linear.smooth is not None:
        rest["smooth"] = linear.smooth.contiguous()
    if linear.bias is not None:
        rest["bias"] = pad(linear.bias, 0, n)
    return rest


def unpack_rest(
    packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int, n_tile: int
) -> dict[str, torch.Tensor]:
    """Inverse of :func:`pack_rest`, checking shapes and that the padding is zero."""
    padded_n, padded_rank = round_up(n, n_tile), round_up(spec.rank, RANK_TILE)
    rest: dict[str, torch.Tensor] = {}
    if spec.rank > 0:
        for name, rows, padded_rows in (("proj_down", k, k), ("proj_up", n, padded_n)):
            if name not in packed:
                raise LayoutError(f"{name} is missing although the rank is {spec.rank}, found {sorted(packed)}")
            check_shape(name, packed[name], (padded_rows, padded_rank))
            rest[name] = cut(name, cut(name, packed[name], 1, spec.rank), 0, rows)
    if "smooth" in packed:
        check_shape("smooth", packed["smooth"], (k,))
        rest["smooth"] = packed["smooth"]
    if "bias" in packed:
        check_shape("bias", packed["bias"], (padded_n,))
        rest["bias"] = cut("bias", packed["bias"], 0, n)
    return rest
