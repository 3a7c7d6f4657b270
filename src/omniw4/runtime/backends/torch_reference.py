"""Back end ``reference``: plain torch, any device and dtype, dense and quantized linears alike.

Its arithmetic is transformers' Qwen3, but for the rotary tables, which are FP32. A token's result has the same bits
whatever else is in the batch (:func:`omniw4.ops.rows.matmul_rows`), which makes it the judge of packing and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.nn.functional as F

from omniw4 import ops
from omniw4.ops.rows import matmul_rows
from omniw4.runtime.qwen3 import DenseLinear, LayerWeights, Linear, Qwen3Config, Residual, Rotary


class ReferenceBackend:
    """Weights stay as they are, shared with the model."""

    name = "reference"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def layer(self, weights: LayerWeights, config: Qwen3Config) -> ReferenceLayer:
        return ReferenceLayer(weights, config, self.dtype)

    def start(self, hidden: torch.Tensor) -> Residual:
        return Residual(hidden)

    def norm(self, stream: Residual, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(stream.hidden, weight, eps)


class ReferenceLayer:
    def __init__(self, weights: LayerWeights, config: Qwen3Config, dtype: torch.dtype) -> None:
        self.weights, self.config = weights, config
        self.q_norm, self.k_norm = (None if w is None else w.to(dtype) for w in (weights.q_norm, weights.k_norm))

    def qkv(self, stream: Residual, rotary: Rotary) -> tuple[torch.Tensor, Residual]:
        weights, config = self.weights, self.config
        x = rms_norm(stream.hidden, weights.input_norm, config.eps)
        qkv = torch.cat([linear(x, part) for part in (weights.q, weights.k, weights.v)], dim=1)
        ops.qknorm_rope(
            qkv, self.q_norm, self.k_norm, rotary.cos, rotary.sin, rotary.positions, config.num_heads,
            config.num_kv_heads, config.head_dim, config.eps,
        )  # fmt: skip
        return qkv, stream

    def output(self, attended: torch.Tensor, stream: Residual) -> Residual:
        return Residual(stream.hidden + linear(attended, self.weights.o))

    def mlp(self, stream: Residual) -> Residual:
        x = rms_norm(stream.hidden, self.weights.post_norm, self.config.eps)
        gated = F.silu(linear(x, self.weights.gate)) * linear(x, self.weights.up)
        return Residual(stream.hidden + linear(gated, self.weights.down))

    def tensors(self) -> Sequence[torch.Tensor]:
        found: list[torch.Tensor] = []
        for part in fields(self.weights):
            value = getattr(self.weights, part.name)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, DenseLinear):
                found += [t for t in (value.weight, value.bias) if t is not None]
            elif not isinstance(value, str | None):
                found += value.tensors().values()
        return found


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``round(round(x / rms) · weight)``; x ``[P, H]``, weight ``[H]``."""
    inv_rms = ops.inv_rms(x, eps)
    return (x.float() * inv_rms[:, None]).to(x.dtype) * weight.to(x.dtype)


def linear(x: torch.Tensor, part: Linear) -> torch.Tensor:
    """``[P, K] -> [P, N]`` of the same dtype, accumulated in FP32."""
    if isinstance(part, DenseLinear):
        y = matmul_rows(x.float(), part.weight.float().T)
        return (y if part.bias is None else y + part.bias.float()).to(x.dtype)
    inv_smooth = None if part.smooth is None else part.smooth.float().reciprocal()
    spec = part.spec
    qact, a_scales, lora_act, token_scales = ops.quantize_lora_down_ref(
        x, part.proj_down, inv_smooth, None, None, spec.rotation, spec.act_bits, spec.act_clip, spec.scale_type
    )
    return ops.gemm_lora_up_ref(
        qact, a_scales, part.qweight, part.w_scales, lora_act if part.proj_up is not None else None, part.proj_up,
        part.bias, None, x.shape[0], part.out_features, spec.act_bits, "plain", x.dtype, part.row_scales, token_scales,
    )  # fmt: skip
