"""Back ends ``fp16`` and ``bf16``: dense linears through cuBLAS, all that lies between them fused.

Nine launches a layer: norm with the residual sum before it, q/k/v product, q/k norm with rotary embedding, attention,
output product, norm, gate/up product, SwiGLU, down product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from omniw4 import ops
from omniw4.errors import ModelError
from omniw4.runtime.qwen3 import DenseLinear, LayerWeights, Linear, Qwen3Config, Residual, Rotary

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DenseBackend:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.dtype, self.device = name, DTYPES[name], device

    def layer(self, weights: LayerWeights, config: Qwen3Config) -> DenseLayer:
        return DenseLayer(weights, config, self.device, self.dtype)

    def start(self, hidden: torch.Tensor) -> Residual:
        return Residual(hidden)

    def norm(self, stream: Residual, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.rms_norm(stream.hidden, stream.delta, weight, eps, False)[0]


class DenseLayer:
    def __init__(self, weights: LayerWeights, config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.norms = LayerNorms(weights, device, dtype)
        parts = {name: dense(getattr(weights, name), weights.path, name) for name in ("q", "k", "v", "o")}
        parts |= {name: dense(getattr(weights, name), weights.path, name) for name in ("gate", "up", "down")}
        self.qkv_proj = stack([parts["q"], parts["k"], parts["v"]], device, dtype)
        self.o_proj = stack([parts["o"]], device, dtype)
        self.gate_up_proj = stack([parts["gate"], parts["up"]], device, dtype)
        self.down_proj = stack([parts["down"]], device, dtype)

    def qkv(self, stream: Residual, rotary: Rotary) -> tuple[torch.Tensor, Residual]:
        x, stream = self.norms.before(stream, self.norms.input_norm, self.config.eps)
        qkv = F.linear(x, *self.qkv_proj)
        self.norms.rotate(qkv, rotary, self.config)
        return qkv, stream

    def output(self, attended: torch.Tensor, stream: Residual) -> Residual:
        return Residual(stream.hidden, F.linear(attended, *self.o_proj))

    def mlp(self, stream: Residual) -> Residual:
        x, stream = self.norms.before(stream, self.norms.post_norm, self.config.eps)
        gated = ops.swiglu(F.linear(x, *self.gate_up_proj), False)[0]
        return Residual(stream.hidden, F.linear(gated, *self.down_proj))

    def tensors(self) -> Sequence[torch.Tensor]:
        linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return [t for weight, bias in linears for t in (weight, bias) if t is not None]


class LayerNorms:
    """The four norms of a layer; shared by the back ends whose norm takes the residual sum along."""

    def __init__(self, weights: LayerWeights, device: torch.device, dtype: torch.dtype) -> None:
        self.input_norm = weights.input_norm.to(device, dtype)
        self.post_norm = weights.post_norm.to(device, dtype)
        self.q_norm, self.k_norm = (
            None if w is None else w.to(device, dtype) for w in (weights.q_norm, weights.k_norm)
        )

    def before(self, stream: Residual, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Residual]:
        """Norm of the stream, and the stream with its sum done."""
        x, _, total = ops.rms_norm(stream.hidden, stream.delta, weight, eps, False)
        return x, Residual(stream.hidden if stream.delta is None else total)

    def before_fp8(
        self, stream: Residual, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Residual]:
        """The same as codes and scales."""
        codes, scales, total = ops.rms_norm(stream.hidden, stream.delta, weight, eps, True)
        return codes, scales, Residual(stream.hidden if stream.delta is None else total)

    def rotate(self, qkv: torch.Tensor, rotary: Rotary, config: Qwen3Config) -> None:
        """q/k norm and rotary embedding, in place."""
        ops.qknorm_rope(
            qkv, self.q_norm, self.k_norm, rotary.cos, rotary.sin, rotary.positions, config.num_heads,
            config.num_kv_heads, config.head_dim, config.eps,
        )  # fmt: skip


def dense(part: Linear, path: str, name: str) -> DenseLinear:
    """Refuse a quantized linear: a dense back end would need another weight than the one that was judged."""
    if not isinstance(part, DenseLinear):
        raise ModelError(
            f"{path}: {name}_proj is quantized, the back end takes dense linears only",
            hint="use the back end w4a4, w4a8 or reference, or build the engine from the original model",
        )
    return part


def stack(
    parts: Sequence[DenseLinear], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights ``[ΣN, K]`` and bias ``[ΣN]`` of linears that read the same input.

    The modules they came from get views of the stacked weight where device and dtype are the same, so that it is in
    memory once.
    """
    if len(parts) == 1:
        weight = parts[0].weight.to(device, dtype)
    else:
        weight = torch.cat([part.weight.to(device, dtype) for part in parts])
        for part, rows in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
            part.adopt(rows)
    if all(part.bias is None for part in parts):
        return weight, None
    biases = [weight.new_zeros(p.out_features) if p.bias is None else p.bias.to(device, dtype) for p in parts]
    return weight, torch.cat(biases)
