"""``quantize_lora_down``: one read of the activations for everything the GEMM needs.

Contract
    With ``round`` to the dtype of x and all else in FP32, one rounding an operation, no fused multiply-add::

        n  = round(round(x · inv_rms) · norm_weight)      # only when norm_weight is given
        s  = n · inv_smooth                               # only when inv_smooth is given
        x' = hadamard64(s)                                # only with rotation "hadamard64"; order: omniw4.hadamard
        qact, a_scales = INT4 per (token, group of 64) | INT8 per token | x' rounded to the dtype of x   (omniw4.int4)
        lora_act = x' · proj_down

    INT4 with integer scales has ``a_scales`` in 0..16, multiples of ``token_scales``; 8 and 16 bits know no such thing
    and are the same with both scale types.

    ============  =====================================================================================
    x             [M, K] float16 or bfloat16 (float32 on a CPU), K a multiple of 64, any strides, M >= 0
    proj_down     [K, R] float, or None for R = 0; in layout wgmma_s8 as omniw4.repack packs it
    inv_smooth    [K] float32: the FP32 reciprocal of ``smooth``; or None
    inv_rms       [M] float32, with norm_weight only; or None: then it is worked out here, as op inv_rms does with eps
    norm_weight   [K] of the dtype of x; or None
    rotation      "none" or "hadamard64"
    act_bits      4, 8 or 16
    act_clip      fraction of absmax that the grid spans
    layout        "canonical", or a kernel family's (omniw4.ops.layouts has the shapes)
    scale_type    "float16" or "integer"
    eps           of the RMS that is worked out here
    weights_ready no kernel still running writes proj_down, inv_smooth or norm_weight: they may be read before the
                  kernel ahead is done
    returns       qact, a_scales float16, lora_act [M, R] float32, token_scales [0] float32; with INT4 and integer
                  scales a_scales uint8 and token_scales [M]; in layout wgmma_s8 as omniw4.ops.layouts has it
    ============  =====================================================================================

    Exact: codes, scales and packing, bit for bit, from the same inv_rms. Bounded: lora_act (kernels multiply in the
    dtype of x and accumulate in FP32); it is FP32 on the interface because a rotated token with a large outlier
    leaves the range of FP16. A row's bits never depend on the other rows, and there are no float atomics. NaN or inf
    in a row give a NaN or inf scale in that row (its outputs become NaN); a zero group has codes 0, and scale 0 (with
    integer scales where all of its token is zero).

    Errors: OpError for wrong shapes, dtypes, devices or options; LayoutError for an unknown layout.

Source: SVDQuant, arXiv 2411.05007 (fused down projection); QuaRot, arXiv 2404.00456 (online Hadamard).
"""

from __future__ import annotations

import torch

from omniw4 import int4
from omniw4.hadamard import hadamard64
from omniw4.ops.checks import (
    FLOATS,
    require,
    require_act_bits,
    require_activations,
    require_dtype,
    require_same_device,
    require_scale_type,
    require_shape,
)
from omniw4.ops.inv_rms import inv_rms_ref
from omniw4.ops.layouts import (
    CANONICAL,
    FLOAT16,
    INTEGER,
    WGMMA_S8,
    activation_shapes,
    branch_width,
    lora_act_shape,
    require_canonical,
)
from omniw4.ops.rows import matmul_rows

_OP = "quantize_lora_down"
_ROTATIONS = ("none", "hadamard64")


def check_quantize_lora_down(
    x: torch.Tensor,
    proj_down: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
    act_bits: int,
    act_clip: float,
    scale_type: str = FLOAT16,
    layout: str = CANONICAL,
) -> None:
    require_activations(_OP, "x", x)
    tokens, width = x.shape
    require(
        width > 0 and width % int4.GROUP_SIZE == 0,
        _OP,
        f"x has {width} columns, wanted a multiple of {int4.GROUP_SIZE}",
    )
    require(rotation in _ROTATIONS, _OP, f"rotation is {rotation!r}, wanted one of {', '.join(_ROTATIONS)}")
    require_act_bits(_OP, act_bits)
    require_scale_type(_OP, scale_type)
    require(0 < act_clip <= 1, _OP, f"act_clip is {act_clip}, wanted more than 0 and at most 1")
    require_same_device(_OP, x, proj_down=proj_down, inv_smooth=inv_smooth, inv_rms=inv_rms, norm_weight=norm_weight)
    require(inv_rms is None or norm_weight is not None, _OP, "inv_rms needs a norm_weight, found none")
    if proj_down is not None:
        require_dtype(_OP, "proj_down", proj_down, *FLOATS)
        packed = layout == WGMMA_S8
        wanted = "[K/64, R'/16, 4, 32, 8]" if packed else "[K, R]"
        found = list(proj_down.shape)
        require(len(found) == (5 if packed else 2), _OP, f"proj_down has shape {found}, wanted {wanted}")
        shape = (width // 64, found[1], 4, 32, 8) if packed else (width, found[1])
        require_shape(_OP, "proj_down", proj_down, shape)
    if inv_smooth is not None:
        require_dtype(_OP, "inv_smooth", inv_smooth, torch.float32)
        require_shape(_OP, "inv_smooth", inv_smooth, (width,))
    if inv_rms is not None:
        require_dtype(_OP, "inv_rms", inv_rms, torch.float32)
        require_shape(_OP, "inv_rms", inv_rms, (tokens,))
    if norm_weight is not None:
        require_dtype(_OP, "norm_weight", norm_weight, x.dtype)
        require_shape(_OP, "norm_weight", norm_weight, (width,))


def transform(
    x: torch.Tensor,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
) -> torch.Tensor:
    """x' of the contract: ``[M, K]`` of any float dtype to ``[M, K]`` float32."""
    if inv_rms is not None and norm_weight is not None:
        x = (x.float() * inv_rms[:, None]).to(x.dtype)
        x = (x.float() * norm_weight.float()).to(x.dtype)
    y = x.float()
    if inv_smooth is not None:
        y = y * inv_smooth
    return hadamard64(y) if rotation == "hadamard64" else y


def quantize_lora_down_ref(
    x: torch.Tensor,
    proj_down: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
    act_bits: int,
    act_clip: float,
    scale_type: str = FLOAT16,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract in plain torch, layout "canonical"."""
    check_quantize_lora_down(x, proj_down, inv_smooth, inv_rms, norm_weight, rotation, act_bits, act_clip, scale_type)
    if norm_weight is not None and inv_rms is None:
        inv_rms = inv_rms_ref(x, eps)
    y = transform(x, inv_smooth, inv_rms, norm_weight, rotation)
    token_scales = y.new_empty(0)
    if act_bits == 4 and scale_type == INTEGER:
        codes, a_scales, outer = int4.quantize_groups_integer(y, act_clip)
        qact, token_scales = int4.pack_nibbles(codes), outer[:, 0].clone()
    elif act_bits == 4:
        codes, a_scales = int4.quantize_groups(y, act_clip)
        qact = int4.pack_nibbles(codes)
    elif act_bits == 8:
        qact, a_scales = int4.quantize_tokens(y, act_clip)
    else:
        qact, a_scales = y.to(x.dtype, copy=True), x.new_empty((x.shape[0], 0), dtype=torch.float16)
    lora_act = y.new_zeros(x.shape[0], 0) if proj_down is None else matmul_rows(y, proj_down.float())
    return qact, a_scales, lora_act, token_scales


@torch.library.custom_op("omniw4::quantize_lora_down", mutates_args=())
def quantize_lora_down(
    x: torch.Tensor,
    proj_down: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
    act_bits: int,
    act_clip: float,
    layout: str,
    scale_type: str = FLOAT16,
    eps: float = 0.0,
    weights_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    require_canonical(layout, _OP)
    return quantize_lora_down_ref(
        x, proj_down, inv_smooth, inv_rms, norm_weight, rotation, act_bits, act_clip, scale_type, eps
    )


@quantize_lora_down.register_fake
def _(
    x: torch.Tensor,
    proj_down: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    inv_rms: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rotation: str,
    act_bits: int,
    act_clip: float,
    layout: str,
    scale_type: str = FLOAT16,
    eps: float = 0.0,
    weights_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    shapes = activation_shapes(layout, tokens, width, act_bits, x.dtype, scale_type)
    lora_shape, lora_dtype = lora_act_shape(layout, tokens, branch_width(layout, proj_down), x.dtype)
    return (
        x.new_empty(shapes.qact, dtype=shapes.qact_dtype),
        x.new_empty(shapes.a_scales, dtype=shapes.a_scales_dtype),
        x.new_empty(lora_shape, dtype=lora_dtype),
        x.new_empty(shapes.token_scales, dtype=torch.float32),
    )
