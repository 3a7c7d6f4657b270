"""One linear through family wgmma_s8, and the same codes for a judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, for_shape

from omniw4 import int4, ops
from omniw4.ops import gemm_wgmma_s8
from omniw4.repack import wgmma_s8
from omniw4.tensors import QuantizedLinear
from problems import relative_error
from shapes import Shape

LAYOUT = "wgmma_s8"
ACT_BITS = (4, 8)
DTYPES = (torch.float16, torch.bfloat16)
SCALE_TYPES = ("float16", "integer")
TILES = (1, 2, 3, 4, 5)
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def skip_elsewhere() -> None:
    if not gemm_wgmma_s8.runs(DEVICE, 4):
        pytest.skip("family wgmma_s8 runs on sm_90 alone, with kernels compiled for 90a")


def integer_scales(linear: QuantizedLinear) -> QuantizedLinear:
    """The same codes with integer group scales, one of them zero."""
    g = torch.Generator(DEVICE).manual_seed(linear.out_features + linear.in_features)
    n, groups = linear.w_scales.shape
    scales = torch.randint(1, 17, (n, groups), generator=g, device=DEVICE, dtype=torch.uint8)
    scales[n // 2, 0] = 0
    rows = torch.rand(n, generator=g, device=DEVICE) * 0.002 + 0.0002
    spec = replace(linear.spec, scale_type="integer")
    return replace(linear, spec=spec, w_scales=scales, row_scales=rows)


def down(linear: QuantizedLinear, layout: str = LAYOUT) -> torch.Tensor | None:
    """``proj_down`` as the quantizer of a layout wants it."""
    if linear.proj_down is None or layout != LAYOUT:
        return linear.proj_down
    return wgmma_s8.pack_proj_down(F.pad(linear.proj_down, (0, -linear.spec.rank % 16)))


def quantize(x: torch.Tensor, linear: QuantizedLinear, act_bits: int, layout: str = LAYOUT) -> Activations:
    return ops.quantize_lora_down(
        x, down(linear, layout), None, None, None, "hadamard64", act_bits, 0.95, layout, linear.spec.scale_type
    )


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
    weights_ready: bool = False,
) -> torch.Tensor:
    up = packed.get("proj_up")
    return gemm_wgmma_s8.gemm(
        "gemm_lora_up", acts[0], acts[1], packed["qweight"], packed["w_scales"], None if up is None else acts[2], up,
        linear.bias, residual, tokens, linear.out_features, act_bits, epilogue, dtype, tile, packed.get("row_scales"),
        weights_ready=weights_ready,
    )  # fmt: skip


@dataclass
class Problem:
    """A linear, an input, its activations in the family's layout, and the same in canonical order."""

    linear: QuantizedLinear
    packed: dict[str, torch.Tensor]
    x: torch.Tensor
    acts: Activations
    codes: torch.Tensor  # [M, K] int8, integer group scales multiplied in
    a_scales: torch.Tensor  # [M, K/64] or [M, 1] float16; [M, 1] float32 with integer scales
    lora_act: torch.Tensor  # [M, R] float32
    act_bits: int
    dtype: torch.dtype

    def run(self, **options: object) -> torch.Tensor:
        return gemm(self.acts, self.packed, self.linear, self.act_bits, self.dtype, len(self.x), **options)  # type: ignore[arg-type]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The linear over the same codes in plain torch, everything in ``dtype`` (FP64 is the judge)."""
        scales = self.a_scales.double().repeat_interleave(self.codes.shape[1] // self.a_scales.shape[1], 1)
        y = (self.codes * scales).to(dtype) @ self.linear.dequantize_codes(torch.float64).to(dtype).T
        if self.linear.proj_up is not None:
            y = y + self.lora_act.to(dtype) @ self.linear.proj_up.to(dtype).T
        return y if self.linear.bias is None else y + self.linear.bias.to(dtype)


def problem(shape: Shape, act_bits: int, dtype: torch.dtype, scale_type: str = "float16") -> Problem:
    x, linear = for_shape(shape, dtype)
    linear = replace(linear, spec=replace(linear.spec, act_bits=act_bits))
    if scale_type == "integer":
        linear = integer_scales(linear)
    qact, a_scales, lora_act, token_scales = quantize(x, linear, act_bits, "canonical")
    codes = int4.unpack_nibbles(qact) if act_bits == 4 else qact
    if act_bits == 4 and scale_type == "integer":
        codes, a_scales = int4.widen(codes, a_scales), token_scales[:, None]
    acts = quantize(x, linear, act_bits)
    return Problem(linear, wgmma_s8.pack(linear), x, acts, codes, a_scales, lora_act, act_bits, dtype)


def assert_bounded(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of the same in plain torch, against FP64."""
    ours, theirs = relative_error(found, exact), relative_error(plain, exact)
    assert ours <= 2 * theirs + 1e-9, f"error {ours:.3g} against FP64, plain torch {theirs:.3g}"


def assert_low_rank(fragments: torch.Tensor, x: torch.Tensor, linear: QuantizedLinear) -> None:
    """``x'·proj_down`` in operand order, at most twice as far from FP64 as plain torch; what pads it is zero."""
    assert linear.proj_down is not None
    rank, (tokens, _) = linear.spec.rank, x.shape
    padded = wgmma_s8.unpack_lora_act(fragments, 16 * -(-tokens // 16), 16 * -(-rank // 16))
    assert not padded[tokens:].any()
    assert not padded[:, rank:].any()
    rotated = ops.transform(x, None, None, None, "hadamard64")
    exact = rotated.double() @ linear.proj_down.double()
    assert_bounded(padded[:tokens, :rank], rotated.to(x.dtype) @ linear.proj_down, exact)
