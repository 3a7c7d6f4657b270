"""Layouts of quantized activations: what ``quantize_lora_down`` writes and ``gemm_lora_up`` reads.

``"canonical"`` is row-major and is what the references speak; every other name is a kernel family's order, known to
the kernels alone. This file states the shapes, so that outputs can be allocated (and traced by torch.compile) without
a kernel at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniw4.errors import LayoutError, OpError
from omniw4.int4 import GROUP_SIZE

CANONICAL = "canonical"
MMA_S8 = "mma_s8"
WGMMA_S8 = "wgmma_s8"
BYTES = (MMA_S8, WGMMA_S8)  # families of byte codes and FP32 scales; they know integer group scales
ACT_BITS = (4, 8, 16)
FLOAT16, INTEGER = "float16", "integer"
SCALE_TYPES = (FLOAT16, INTEGER)


@dataclass(frozen=True)
class ActivationShapes:
    """Shapes and dtypes of the tensors that hold quantized activations; ``token_scales`` is float32."""

    qact: tuple[int, ...]
    qact_dtype: torch.dtype
    a_scales: tuple[int, ...]
    a_scales_dtype: torch.dtype = torch.float16
    token_scales: tuple[int, ...] = (0,)


def activation_shapes(
    layout: str, tokens: int, in_features: int, act_bits: int, dtype: torch.dtype, scale_type: str = FLOAT16
) -> ActivationShapes:
    """Shapes of quantized activations of ``[tokens, in_features]`` in a layout.

    ==========  ========  ===============================  =========================
    layout      act_bits  qact                             a_scales (float16, FP32 in mma_s8, wgmma_s8)
    ==========  ========  ===============================  =========================
    canonical   4         [M, K/2] uint8, two codes a byte  [M, K/64]
    canonical   8         [M, K] int8                      [M, 1]
    canonical   16        [M, K] of ``dtype``              [M, 0]
    mma_s4      4         [M/16, K/64, 32, 16] uint8       [K/64, 16·⌈M/16⌉]
    mma_s8      4         [M, K] int8                      [K/64, 16·⌈M/16⌉]
    mma_s8      8         [M, K] int8                      [16·⌈M/16⌉]
    wgmma_s8    4         [⌈K/128⌉, 16·⌈M/16⌉, 128] int8   [⌈K/128⌉, ⌈M/16⌉, 2, 16]
    wgmma_s8    8         [⌈K/128⌉, 16·⌈M/16⌉, 128] int8   [16·⌈M/16⌉]
    ==========  ========  ===============================  =========================

    Integer scales concern 4 bits alone: then canonical a_scales are uint8 and token_scales [M]. In mma_s8 and wgmma_s8
    they are multiplied into the codes, and what is left is as with 8 bits: a_scales of the tokens. Everywhere else
    token_scales are empty.

    Args:
        tokens: M; may be symbolic.
        in_features: K, a multiple of 64.
        dtype: of the unquantized input; the dtype of qact when act_bits is 16.
        scale_type: "float16" or "integer".

    Raises:
        LayoutError: the layout is unknown, or does not hold activations of act_bits or scale_type.
    """
    groups = in_features // GROUP_SIZE
    padded = (tokens + 15) // 16 * 16
    nibbles = ((tokens, in_features // 2), torch.uint8)
    table: dict[tuple[str, int], ActivationShapes] = {
        (CANONICAL, 4): ActivationShapes(*nibbles, (tokens, groups)),
        (CANONICAL, 8): ActivationShapes((tokens, in_features), torch.int8, (tokens, 1)),
        (CANONICAL, 16): ActivationShapes((tokens, in_features), dtype, (tokens, 0)),
        ("mma_s4", 4): ActivationShapes((padded // 16, groups, 32, 16), torch.uint8, (groups, padded)),
    }
    pairs = (groups + 1) // 2
    codes: dict[str, tuple[int, ...]] = {MMA_S8: (tokens, in_features), WGMMA_S8: (pairs, padded, 128)}
    group_scales: dict[str, tuple[int, ...]] = {MMA_S8: (groups, padded), WGMMA_S8: (pairs, padded // 16, 2, 16)}
    for name in BYTES:
        table[name, 4] = ActivationShapes(codes[name], torch.int8, group_scales[name], torch.float32)
        table[name, 8] = ActivationShapes(codes[name], torch.int8, (padded,), torch.float32)
    if scale_type == INTEGER and act_bits == 4:
        if layout in BYTES:
            return table[layout, 8]
        if layout != CANONICAL:
            raise LayoutError(
                f"layout {layout!r} does not hold activations with integer group scales",
                hint=f"layouts {' and '.join(repr(name) for name in BYTES)} do",
            )
        return ActivationShapes(*nibbles, (tokens, groups), torch.uint8, (tokens,))
    if (layout, act_bits) not in table:
        known = ", ".join(f"{name}/{bits}" for name, bits in table)
        raise LayoutError(f"no activation layout {layout!r} for {act_bits}-bit activations", hint=f"known: {known}")
    return table[layout, act_bits]


def lora_act_shape(layout: str, tokens: int, rank: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the low-rank activations that the quantizer returns: ``[M, R]`` float32, but in wgmma_s8 the
    operand of the product to come, ``[⌈R/16⌉, 2·⌈M/16⌉, 2, 8, 8]`` of ``dtype``."""
    if layout == WGMMA_S8:
        return ((rank + 15) // 16, (tokens + 15) // 16 * 2, 2, 8, 8), dtype
    return (tokens, rank), torch.float32


def branch_width(layout: str, proj_down: torch.Tensor | None) -> int:
    """Columns of ``proj_down``: R of ``[K, R]``, and R' of wgmma_s8's ``[K/64, R'/16, 4, 32, 8]``; 0 for None."""
    if proj_down is None:
        return 0
    return proj_down.shape[1] * (16 if layout == WGMMA_S8 else 1)


def require_canonical(layout: str, op: str) -> None:
    """The references read and write row-major tensors only; raises OpError for a kernel family's layout."""
    if layout != CANONICAL:
        raise OpError(
            f"{op}: the reference works in layout 'canonical' only, found {layout!r}",
            hint="layouts of a kernel family need their tensors on a CUDA device and the compiled kernels",
        )


@dataclass(frozen=True)
class _Family:
    runs: Callable[[torch.device, int], bool]
    scale_types: tuple[str, ...]


_KERNELS: dict[str, _Family] = {}


def register_kernels(
    layout: str, runs: Callable[[torch.device, int], bool], scale_types: tuple[str, ...] = (FLOAT16,)
) -> None:
    """Make a compiled kernel family known.

    Args:
        layout: the layout its weights and activations are in.
        runs: ``runs(device, act_bits)``, whether the family works there; registered in order of preference.
        scale_types: of the linears it runs.
    """
    _KERNELS[layout] = _Family(runs, scale_types)


def kernel_layout(device: torch.device, act_bits: int, scale_type: str = FLOAT16) -> str:
    """The layout of the preferred kernel family for a device, or "canonical" where only the reference runs."""
    if device.type == "cuda":
        for layout, family in _KERNELS.items():
            if scale_type in family.scale_types and family.runs(device, act_bits):
                return layout
    return CANONICAL
