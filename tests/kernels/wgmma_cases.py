"""One linear through family wgmma_s8, and the same codes for a judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import DEVICE, for_shape

from omniw4 import int4, ops
from omniw4.ops import gemm_wgmma_s8
from omniw4.repack import wgmma_s8
from omniw4.tensors import QuantizedLinear
from shapes import Shape

LAYOUT = "wgmma_s8"
ACT_BITS = (4, 8)
DTYPES = (torch.float16, torch.bfloat16)
TILES = (1, 2, 3, 4, 5)
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def skip_elsewhere() -> None:
    if not gemm_wgmma_s8.runs(DEVICE, 4):
        pytest.skip("family wgmma_s8 runs on sm_90 alone, with kernels compiled for 90a")


def quantize(x: torch.Tensor, linear: QuantizedLinear, act_bits: int, layout: str = LAYOUT) -> Activations:
    return ops.quantize_lora_down(x, linear.proj_down, None, None, None, "hadamard64", act_bits, 0.95, layout)[:3]


def gemm(
    acts: Activations,
    packed: dict[str, torch.Tensor],
    linear: QuantizedLinear,
    act_bits: int,
    dtype: torch.dtype,
    tokens: int,
    *,
    epilogue: str = "plain",
    residual: torch.Tensor | None = None,
    tile: int = 0,
) -> torch.Tensor:
    up = packed.get("proj_up")
    return gemm_wgmma_s8.gemm(
        "gemm_lora_up", acts[0], acts[1], packed["qweight"], packed["w_scales"], None if up is None else acts[2], up,
        linear.bias, residual, tokens, linear.out_features, act_bits, epilogue, dtype, tile,
    )  # fmt: skip


@dataclass
class Problem:
    """A linear, an input, its activations in the family's layout, and the same in canonical order."""

    linear: QuantizedLinear
    packed: dict[str, torch.Tensor]
    x: torch.Tensor
    acts: Activations
    codes: torch.Tensor  # [M, K] int8
    a_scales: torch.Tensor  # [M, K/64] or [M, 1] float16
    lora_act: torch.Tensor  # [M, R] float32
    act_bits: int
    dtype: torch.dtype

    def run(self, **options: object) -> torch.Tensor:
        return gemm(self.acts, self.packed, self.linear, self.act_bits, self.dtype, len(self.x), **options)  # type: ignore[arg-type]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The linear over the same codes in plain torch, everything in ``dtype`` (FP64 is the judge)."""
        acts = int4.dequantize(self.codes, self.a_scales, torch.float64).to(dtype)
        weight = int4.dequantize(int4.unpack_nibbles(self.linear.qweight), self.linear.w_scales, torch.float64)
        y = acts @ weight.to(dtype).T
        if self.linear.proj_up is not None:
            y = y + self.lora_act.to(dtype) @ self.linear.proj_up.to(dtype).T
        return y if self.linear.bias is None else y + self.linear.bias.to(dtype)


def problem(shape: Shape, act_bits: int, dtype: torch.dtype) -> Problem:
    x, linear = for_shape(shape, dtype)
    linear = replace(linear, spec=replace(linear.spec, act_bits=act_bits))
    qact, a_scales, lora_act = quantize(x, linear, act_bits, "canonical")
    codes = int4.unpack_nibbles(qact) if act_bits == 4 else qact
    acts = quantize(x, linear, act_bits)
    return Problem(linear, wgmma_s8.pack(linear), x, acts, codes, a_scales, lora_act, act_bits, dtype)
