"""Stack quantized linears that read the same input into one, whose product gives the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from omniw4.tensors import QuantizedLinear

MAX_RANK = 256  # of a low-rank branch, in the kernels
RANK_TILE = 16


def why_not(parts: Sequence[QuantizedLinear]) -> str:
    """Why linears cannot be stacked; empty when they can. Their inputs must become the same codes."""
    first = parts[0]
    for other in parts[1:]:
        if replace(other.spec, rank=0) != replace(first.spec, rank=0):
            return "they are quantized by different specs"
        if other.in_features != first.in_features:
            return f"they read {first.in_features} and {other.in_features} features"
        if not _same(first.smooth, other.smooth):
            return "they have different smoothing vectors"
    if len({part.proj_down.dtype for part in parts if part.proj_down is not None}) > 1:
        return "their low-rank branches have different dtypes"
    rank = sum(-(-_rank(part) // RANK_TILE) * RANK_TILE for part in parts) if len(parts) > 1 else _rank(first)
    if rank > MAX_RANK:
        return f"their low-rank branches have rank {rank} together, the kernels go up to {MAX_RANK}"
    return ""


def segments(parts: Sequence[QuantizedLinear]) -> tuple[int, ...]:
    """Where the rows of the second and later parts begin, for a product whose rows take columns of ``lora_act`` by
    segment; empty where low-rank branches of different ranks, or of none, rule that out."""
    if len(parts) == 1 or len({_rank(part) for part in parts}) > 1 or not _rank(parts[0]):
        return ()
    return tuple(accumulate(part.out_features for part in parts[:-1]))


def stack_segments(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """One linear with the rows of all, one behind the other, for a product that knows its :func:`segments`.

    ``proj_down`` are put side by side, ``proj_up`` one below the other::

        proj_down = [ D_q | D_k | D_v ]          proj_up = | U_q |
                                                           | U_k |
                                                           | U_v |

    Ranks are padded to a multiple of 16 with zeros, the unit of the kernels; ``spec.rank`` is that of one part.
    """
    rank = _rank(parts[0])
    padding = (0, -rank % RANK_TILE)
    stacked = stack_rows([replace(part, proj_down=None, proj_up=None) for part in parts])
    downs = [F.pad(part.proj_down, padding) for part in parts if part.proj_down is not None]
    ups = [F.pad(part.proj_up, padding) for part in parts if part.proj_up is not None]
    spec = replace(stacked.spec, rank=rank + padding[1])
    return replace(stacked, spec=spec, proj_down=torch.cat(downs, dim=1), proj_up=torch.cat(ups))


def stack_rows(parts: Sequence[QuantizedLinear], *, interleave: bool = False) -> QuantizedLinear:
    """One linear with the rows of all: one behind the other, or with ``interleave`` the first of each, the second of
    each, and so on.

    ``proj_down`` are put side by side and ``proj_up`` on a diagonal of blocks, so that each row meets its own branch
    and zeros::

        proj_down = [ D_q | D_k | D_v ]          proj_up = | U_q          |
                                                           |     U_k      |
                                                           |          U_v |

    Args:
        parts: linears for which :func:`why_not` is empty; of equal out_features with ``interleave``.
    """
    first = parts[0]
    ranks = [_rank(part) for part in parts]

    def rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if interleave:
            return torch.stack(tuple(tensors), dim=1).flatten(0, 1)
        return torch.cat(tuple(tensors))

    down = up = None
    if sum(ranks):
        down = torch.cat([part.proj_down for part in parts if part.proj_down is not None], dim=1)
        placed, start = [], 0
        for part, rank in zip(parts, ranks, strict=True):
            block = down.new_zeros(part.out_features, sum(ranks))
            if part.proj_up is not None:
                block[:, start : start + rank] = part.proj_up
            placed.append(block)
            start += rank
        up = rows(placed)
    bias = None
    if any(part.bias is not None for part in parts):
        kind = next(part.bias for part in parts if part.bias is not None)
        bias = rows([kind.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts])
    scales = [part.row_scales for part in parts if part.row_scales is not None]
    return QuantizedLinear(
        spec=replace(first.spec, rank=sum(ranks)),
        qweight=rows([part.qweight for part in parts]),
        w_scales=rows([part.w_scales for part in parts]),
        row_scales=rows(scales) if scales else None,
        proj_down=down,
        proj_up=up,
        smooth=first.smooth,
        bias=bias,
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _rank(part: QuantizedLinear) -> int:
    return 0 if part.proj_down is None else part.proj_down.shape[1]
