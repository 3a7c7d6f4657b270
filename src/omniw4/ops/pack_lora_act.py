"""``pack_lora_act``: row-major ``lora_act`` to the fragment order of ``mma.m16n8k16``'s A operand.

Contract
    ========  =====================================================================
    lora_act  [M, R] float32, M >= 0, R >= 0
    dtype     float16 or bfloat16: what the tensor cores multiply
    returns   [⌈M/16⌉, ⌈R/16⌉, 32, 8] of dtype: tile row, K step, lane, register half
    ========  =====================================================================

    Rows and columns past M and R are zero. A lane's eight values are one 16-byte load, in register order a0..a7; with
    ``g = lane / 4`` and ``t = lane % 4`` (PTX ISA, "Matrix fragments for mma.m16n8k16")::

                      columns 2t, 2t+1    columns 2t+8, 2t+9
        row g              a0 a1               a4 a5
        row g + 8          a2 a3               a6 a7

    Exact: rounding to dtype is to nearest even, what is too large becomes inf as in any cast; the rest is a copy.
    ``gemm_lora_up`` takes the result instead of the row-major tensor. Not needed where the quantizer owns whole rows.

    Errors: OpError for a wrong rank or dtype.
"""

from __future__ import annotations

import torch

from omniw4.ops.checks import HALVES, require, require_dtype

_OP = "pack_lora_act"
_TILE = 16


def check_pack_lora_act(lora_act: torch.Tensor, dtype: torch.dtype) -> None:
    require(lora_act.dim() == 2, _OP, f"lora_act has shape {list(lora_act.shape)}, wanted [M, R]")
    require_dtype(_OP, "lora_act", lora_act, torch.float32)
    require(dtype in HALVES, _OP, f"dtype is {dtype}, wanted torch.float16 or torch.bfloat16")


def pack_lora_act_ref(lora_act: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The contract in plain torch."""
    check_pack_lora_act(lora_act, dtype)
    tokens, rank = lora_act.shape
    rows, steps = -(-tokens // _TILE), -(-rank // _TILE)
    padded = lora_act.new_zeros(rows * _TILE, steps * _TILE, dtype=dtype)
    padded[:tokens, :rank] = lora_act.to(dtype)
    # row = (half m, g), column = (half k, t, pair):  [rows, m, g, steps, k, t, pair] -> [rows, steps, g, t, k, m, pair]
    tiles = padded.reshape(rows, 2, 8, steps, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6)
    return tiles.reshape(rows, steps, 32, 8).contiguous()


def unpack_lora_act(packed: torch.Tensor, tokens: int, rank: int) -> torch.Tensor:
    """Inverse index map: ``[⌈M/16⌉, ⌈R/16⌉, 32, 8]`` to ``[M, R]`` float32."""
    rows, steps = packed.shape[:2]
    tiles = packed.reshape(rows, steps, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6)
    return tiles.reshape(rows * _TILE, steps * _TILE)[:tokens, :rank].float()


@torch.library.custom_op("omniw4::pack_lora_act", mutates_args=())
def pack_lora_act(lora_act: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return pack_lora_act_ref(lora_act, dtype)


@pack_lora_act.register_fake
def _(lora_act: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tokens, rank = lora_act.shape
    return lora_act.new_empty(((tokens + 15) // 16, (rank + 15) // 16, 32, 8), dtype=dtype)
