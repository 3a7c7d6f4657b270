"""``swiglu``: the gated activation of an MLP whose gate and up come from one product.

Contract
    With ``round`` to the dtype of gate_up and all else in FP32::

        y[m, j] = round(gate_up[m, j] · sigmoid(gate_up[m, j]) · gate_up[m, I + j])
        fp8: codes and scales of y as in the op quantize_fp8

    ========  =============================================================================
    gate_up   [M, 2·I] float16 or bfloat16 (float32 on a CPU), any strides
    fp8       whether y comes as codes
    returns   y [M, I] of the dtype (codes: float8_e4m3fn), scales [M, 1] float32 (without fp8 [M, 0])
    ========  =============================================================================

    Bounded, by a unit in the last place of y: exponentials differ between libraries. A row's bits never depend on the
    other rows.

    Errors: OpError for a wrong rank, dtype or an odd width.

Source: GLU variants improve transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniw4.ops.checks import require, require_activations
from omniw4.ops.quantize_fp8 import FP8, fp8_rows

_OP = "swiglu"


def check_swiglu(gate_up: torch.Tensor) -> None:
    require_activations(_OP, "gate_up", gate_up)
    width = gate_up.shape[1]
    require(width > 0 and width % 2 == 0, _OP, f"gate_up has {width} columns, wanted gate and up of equal width")


def swiglu_ref(gate_up: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract in plain torch."""
    check_swiglu(gate_up)
    gate, up = gate_up.float().chunk(2, dim=1)
    y = (F.silu(gate) * up).to(gate_up.dtype)
    if fp8:
        return fp8_rows(y)
    return y, gate_up.new_empty((gate_up.shape[0], 0), dtype=torch.float32)


@torch.library.custom_op("omniw4::swiglu", mutates_args=())
def swiglu(gate_up: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return swiglu_ref(gate_up, fp8)


@swiglu.register_fake
def _(gate_up: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = gate_up.shape
    y = gate_up.new_empty((tokens, width // 2), dtype=FP8 if fp8 else gate_up.dtype)
    return y, gate_up.new_empty((tokens, 1 if fp8 else 0), dtype=torch.float32)
