"""One linear through family mma_s8, and the same codes for a judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernel_cases import for_shape
from wgmma_cases import integer_scales

from omniw4 import int4, ops
from omniw4.ops import gemm_mma_s8
from omniw4.repack import mma_s8
from omniw4.tensors import QuantizedLinear
from shapes import Shape

LAYOUT = mma_s8.LAYOUT
DTYPES = (torch.float16, torch.bfloat16)
KINDS = (("integer", 4), ("integer", 8), ("float16", 4), ("float16", 8))
TILES = (16, 64, 128)
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, linear: QuantizedLinear, act_bits: int, layout: str = LAYOUT) -> Activations:
    return ops.quantize_lora_down(
        x, linear.proj_down, None, None, None, "hadamard64", act_bits, 0.95, layout, linear.spec.scale_type
    )


def packed_activations(acts: Activations, act_bits: int, scale_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Canonical activations as the layout has them."""
    codes, scales, _, outer = acts
    if act_bits == 8:
        return mma_s8.pack_activations(codes, scales, 8)
    codes = int4.unpack_nibbles(codes)
    if scale_type == "integer":
        return mma_s8.pack_activations(int4.widen(codes, scales), outer[:, None], 8)
    return mma_s8.pack_activations(codes, scales, 4)


@dataclass
class Problem:
    """A linear, an input, its activations in the family's layout, and what they stand for."""

    linear: QuantizedLinear
    packed: dict[str, torch.Tensor]
    x: torch.Tensor
    acts: Activations
    act_bits: int
    dtype: torch.dtype

    def run(
        self,
        acts: Activations | None = None,
        *,
        epilogue: str = "plain",
        residual: torch.Tensor | None = None,
        tile: int = 0,
        tokens: int | None = None,
    ) -> torch.Tensor:
        qact, a_scales, lora_act, _ = self.acts if acts is None else acts
        up = self.packed.get("proj_up")
        return gemm_mma_s8.gemm(
            "gemm_lora_up", qact, a_scales, self.packed["qweight"], self.packed["w_scales"],
            None if up is None else lora_act, up, self.linear.bias, residual,
            len(self.x) if tokens is None else tokens, self.linear.out_features, self.act_bits, epilogue, self.dtype,
            tile, self.packed.get("row_scales"),
        )  # fmt: skip

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The linear over the same codes in plain torch, everything in ``dtype`` (FP64 is the judge)."""
        qact, a_scales, lora_act, _ = self.acts
        spans = a_scales[None] if a_scales.dim() == 1 else a_scales
        scales = spans[:, : len(self.x)].T.double().repeat_interleave(qact.shape[1] // len(spans), 1)
        y = (qact * scales).to(dtype) @ self.linear.dequantize_codes(torch.float64).to(dtype).T
        if self.linear.proj_up is not None:
            y = y + lora_act.to(dtype) @ self.linear.proj_up.to(dtype).T
        return y if self.linear.bias is None else y + self.linear.bias.to(dtype)


def problem(shape: Shape, scale_type: str, act_bits: int, dtype: torch.dtype = torch.float16) -> Problem:
    x, linear = for_shape(shape, dtype)
    linear = replace(linear, spec=replace(linear.spec, act_bits=act_bits))
    if scale_type == "integer":
        linear = integer_scales(linear)
    return Problem(linear, mma_s8.pack(linear), x, quantize(x, linear, act_bits), act_bits, dtype)
