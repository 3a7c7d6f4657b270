"""Back end ``fp8``: e4m3 linears with one scale a token and one an output feature.

Ten launches a layer: as the dense back ends, with the quantization inside the norms and SwiGLU, and one more before the
output product. The product is ``torch._scaled_mm``; older versions of torch write BF16 alone where scales go by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omniw4 import ops
from omniw4.errors import UsageError
from omniw4.ops.checks import HALVES
from omniw4.ops.rows import matmul_rows
from omniw4.runtime.backends.fp16 import LayerNorms, dense
from omniw4.runtime.qwen3 import DenseLinear, LayerWeights, Qwen3Config, Residual, Rotary

_CAPABILITY = (8, 9)  # the first with FP8 tensor cores


class FP8Backend:
    name = "fp8"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        if dtype not in HALVES:
            raise UsageError(f"back end 'fp8' has hidden states of 16 bits, the model's are {dtype}")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
            raise UsageError(f"back end 'fp8' needs FP8 tensor cores, {torch.cuda.get_device_name(device)} has none")
        if device.type == "cuda" and (reason := _why_not(device, dtype)):
            raise UsageError(f"torch's FP8 product does not run in {dtype}: {reason}", hint="try the model in bfloat16")

    def layer(self, weights: LayerWeights, config: Qwen3Config) -> FP8Layer:
        return FP8Layer(weights, config, self.device, self.dtype)

    def start(self, hidden: torch.Tensor) -> Residual:
        return Residual(hidden)

    def norm(self, stream: Residual, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.rms_norm(stream.hidden, stream.delta, weight, eps, False)[0]


def _why_not(device: torch.device, dtype: torch.dtype) -> str:
    """What torch says to a small product with scales of rows; empty when it runs."""
    codes = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=dtype)
    except (RuntimeError, ValueError) as e:
        return " ".join(str(e).split())[:160]
    return ""


class FP8Layer:
    def __init__(self, weights: LayerWeights, config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.norms = LayerNorms(weights, device, dtype)

        def fused(*names: str) -> FP8Linear:
            parts = [dense(getattr(weights, name), weights.path, name) for name in names]
            return FP8Linear.from_dense(parts, device, dtype)

        self.qkv_proj = fused("q", "k", "v")
        self.o_proj = fused("o")
        self.gate_up_proj = fused("gate", "up")
        self.down_proj = fused("down")

    def qkv(self, stream: Residual, rotary: Rotary) -> tuple[torch.Tensor, Residual]:
        codes, scales, stream = self.norms.before_fp8(stream, self.norms.input_norm, self.config.eps)
        qkv = self.qkv_proj(codes, scales)
        self.norms.rotate(qkv, rotary, self.config)
        return qkv, stream

    def output(self, attended: torch.Tensor, stream: Residual) -> Residual:
        return Residual(stream.hidden, self.o_proj(*ops.quantize_fp8(attended)))

    def mlp(self, stream: Residual) -> Residual:
        codes, scales, stream = self.norms.before_fp8(stream, self.norms.post_norm, self.config.eps)
        gated = ops.swiglu(self.gate_up_proj(codes, scales), True)
        return Residual(stream.hidden, self.down_proj(*gated))

    def tensors(self) -> Sequence[torch.Tensor]:
        linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return [tensor for part in linears for tensor in part.tensors()]


@dataclass
class FP8Linear:
    codes: torch.Tensor  # [N, K] float8_e4m3fn
    scales: torch.Tensor  # [1, N] float32
    bias: torch.Tensor | None  # [N]
    dtype: torch.dtype

    @classmethod
    def from_dense(cls, parts: Sequence[DenseLinear], device: torch.device, dtype: torch.dtype) -> FP8Linear:
        """Linears that read the same input, their rows one behind the other, each row with its own scale."""
        quantized = [ops.quantize_fp8_ref(part.weight.to(device, torch.float32).to(dtype)) for part in parts]
        codes = torch.cat([pair[0].view(torch.uint8) for pair in quantized]).view(torch.float8_e4m3fn)
        scales = torch.cat([pair[1] for pair in quantized])
        bias = None
        if any(part.bias is not None for part in parts):
            zeros = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
            bias = torch.cat(zeros).to(device, dtype)
        return cls(codes, scales.t().contiguous(), bias, dtype)

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``[M, K]`` codes with ``[M, 1]`` scales to ``[M, N]``."""
        if codes.is_cuda:
            return torch._scaled_mm(
                codes, self.codes.t(), scales, self.scales, self.bias, out_dtype=self.dtype, use_fast_accum=True
            )
        y = matmul_rows(codes.float(), self.codes.float().t()) * scales * self.scales
        return (y if self.bias is None else y + self.bias.float()).to(self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.codes, self.scales, self.bias) if tensor is not None]
