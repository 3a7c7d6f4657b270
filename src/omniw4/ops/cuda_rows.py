"""The ops of the dense back ends on a CUDA device, one block a row, and the quantizer's: one launch an op.

Importing this module registers the kernels. Widths that they do not take run through the references.
"""

from __future__ import annotations

import torch

from omniw4.ops import extension
from omniw4.ops.checks import require_activations
from omniw4.ops.launch import NAMES, address, aligned, aligned_rows, launch, launch_alone
from omniw4.ops.quantize_fp8 import FP8, quantize_fp8, quantize_fp8_ref
from omniw4.ops.rms_norm import check_rms_norm, rms_norm, rms_norm_ref
from omniw4.ops.round_columns import check_round_columns, round_columns, round_columns_ref
from omniw4.ops.swiglu import check_swiglu, swiglu, swiglu_ref

MAX_WIDTH = 16384  # kMaxRow in kernels/common/row.cuh
VECTOR = 8


def _fits(x: torch.Tensor, width: int) -> bool:
    return width % VECTOR == 0 and 0 < width <= MAX_WIDTH and extension.usable(x.device)


def _row_stride(x: torch.Tensor) -> int:
    """torch gives a single row any stride; the kernels want one that fits."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _outputs(x: torch.Tensor, width: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.new_empty((x.shape[0], width), dtype=FP8 if fp8 else x.dtype)
    return y, x.new_empty((x.shape[0], 1 if fp8 else 0), dtype=torch.float32)


@rms_norm.register_kernel("cuda")
def _rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rms_norm(x, delta, weight, eps)
    tokens, width = x.shape
    if not _fits(x, width):
        return rms_norm_ref(x, delta, weight, eps, fp8)
    x, weight = aligned_rows(x), aligned(weight)
    added = None if delta is None else aligned(delta)
    y, scales = _outputs(x, width, fp8)
    total = x.new_empty((0 if delta is None else tokens, width))
    launch(
        "rms_norm", "rms_norm", x, x=x.data_ptr(), delta=address(added), weight=weight.data_ptr(), y=y.data_ptr(),
        sum=0 if delta is None else total.data_ptr(), scales=scales.data_ptr() if fp8 else 0, rows=tokens, cols=width,
        row_stride=_row_stride(x), eps=eps, fp8=fp8, dtype=NAMES[x.dtype],
    )  # fmt: skip
    return y, scales, total


@swiglu.register_kernel("cuda")
def _swiglu(gate_up: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    check_swiglu(gate_up)
    width = gate_up.shape[1] // 2
    if not _fits(gate_up, width):
        return swiglu_ref(gate_up, fp8)
    gate_up = aligned_rows(gate_up)
    y, scales = _outputs(gate_up, width, fp8)
    launch(
        "swiglu", "swiglu", gate_up, gate_up=gate_up.data_ptr(), y=y.data_ptr(),
        scales=scales.data_ptr() if fp8 else 0, rows=gate_up.shape[0], cols=width, row_stride=_row_stride(gate_up),
        fp8=fp8, dtype=NAMES[gate_up.dtype],
    )  # fmt: skip
    return y, scales


@quantize_fp8.register_kernel("cuda")
def _quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    require_activations("quantize_fp8", "x", x)
    if not _fits(x, x.shape[1]):
        return quantize_fp8_ref(x)
    x = aligned_rows(x)
    codes, scales = _outputs(x, x.shape[1], True)
    launch(
        "quantize_fp8", "quantize_fp8", x, x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(),
        rows=x.shape[0], cols=x.shape[1], row_stride=_row_stride(x), dtype=NAMES[x.dtype],
    )  # fmt: skip
    return codes, scales


@round_columns.register_kernel("cuda")
def _round_columns(
    values: torch.Tensor, coupling: torch.Tensor, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_round_columns(values, coupling, known)
    if not extension.usable(values.device):
        return round_columns_ref(values, coupling, known)
    codes, changes = torch.empty_like(values), torch.empty_like(values)
    coupling, known = aligned(coupling), None if known is None else known.contiguous()
    launch_alone(
        "round_columns", "round_columns", values, values=values.data_ptr(),
        coupling=coupling.data_ptr(), known=address(known), codes=codes.data_ptr(), changes=changes.data_ptr(),
        batch=values.shape[0], rows=values.shape[2],
    )  # fmt: skip
    return codes, changes
