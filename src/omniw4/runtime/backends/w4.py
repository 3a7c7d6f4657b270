"""Back ends ``w4a4`` and ``w4a8``: quantized linears through the ops of this package.

A layer is: norm with quantization and low-rank down projection, q/k/v product with q/k norm and rotary embedding in its
epilogue, attention, quantization, output product with the residual sum, norm with quantization, gate/up product with
SwiGLU, quantization, down product with the residual sum. q, k, v and gate, up become one linear each
(:mod:`omniw4.runtime.fuse`); where they cannot, they run one by one, which is said once. A linear the checkpoint left
alone runs as a dense one.

Where no kernel is compiled for the device the ops' references run, on a CPU with FP32 hidden states too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from omniw4 import ops, repack
from omniw4.errors import LayoutError, UsageError
from omniw4.repack import wgmma_s8
from omniw4.runtime import fuse
from omniw4.runtime.backends.fp16 import LayerNorms
from omniw4.runtime.qwen3 import DenseLinear, LayerWeights, Linear, Qwen3Config, Residual, Rotary
from omniw4.tensors import QuantizedLinear

WGMMA_S8 = wgmma_s8.LAYOUT
# Tokens up to which norm and rotation of heads are in the epilogue of the q/k/v product. Of more tokens a block has
# many to do that for, with nothing to hide it, and the op after the product is faster. The bits are the same.
HEADS_IN_PRODUCT = 384
SEGMENT_STEP = 64  # rows, at whose multiples the kernels change to the next low-rank branch

log = logging.getLogger(__name__)


class W4Backend:
    """``w4a4`` keeps the activation bits of each linear, ``w4a8`` makes 8 of 4."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, layout: str | None = None) -> None:
        if device.type == "cuda" and dtype == torch.float32:
            raise UsageError("hidden states in float32 are not for a GPU", hint="load the model in 16 bits")
        self.name, self.device, self.dtype, self.layout = name, device, dtype, layout
        self._said: set[str] = set()

    def layer(self, weights: LayerWeights, config: Qwen3Config) -> W4Layer:
        return W4Layer(weights, config, self)

    def start(self, hidden: torch.Tensor) -> Residual:
        return Residual(hidden)

    def norm(self, stream: Residual, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.rms_norm(stream.hidden, stream.delta, weight, eps, False)[0]

    def fuse(self, path: str, names: Sequence[str], parts: Sequence[Linear], *, interleave: bool) -> list[Projection]:
        """Linears of one input: one projection where they can be stacked, else one for each."""
        chosen = [self._with_act_bits(part) for part in parts]
        quantized = [part for part in chosen if isinstance(part, QuantizedLinear)]
        reason = fuse.why_not(quantized) if len(quantized) == len(chosen) else "some of them are not quantized"
        if not reason:
            return [self._stacked(quantized, interleave)]
        if all(isinstance(part, DenseLinear) for part in chosen):
            return [self.projection(part) for part in chosen]
        if reason not in self._said:
            self._said.add(reason)
            log.warning("%s: %s are not fused: %s", path, ", ".join(f"{name}_proj" for name in names), reason)
        return [self.projection(part) for part in chosen]

    def _stacked(self, parts: Sequence[QuantizedLinear], interleave: bool) -> PackedProjection:
        parts = [part.to(self.device) for part in parts]
        spec = parts[0].spec
        layout = self.layout or ops.kernel_layout(self.device, spec.act_bits, spec.scale_type)
        ends = () if interleave else fuse.segments(parts)
        in_place = layout == ops.CANONICAL or (layout == WGMMA_S8 and spec.scale_type == "integer")
        if ends and in_place and not any(end % SEGMENT_STEP for end in ends):
            return PackedProjection.pack(fuse.stack_segments(parts), layout, self.dtype, ends)
        whole = parts[0] if len(parts) == 1 else fuse.stack_rows(parts, interleave=interleave)
        return PackedProjection.pack(whole, layout, self.dtype)

    def projection(self, part: Linear) -> Projection:
        if isinstance(part, DenseLinear):
            bias = None if part.bias is None else part.bias.to(self.device, self.dtype)
            return DenseProjection(part.weight.to(self.device, self.dtype), bias)
        return self._stacked([part], interleave=False)

    def _with_act_bits(self, part: Linear) -> Linear:
        """With 16-bit activations a linear is a dense one, once its weight is written out."""
        if isinstance(part, DenseLinear):
            return part
        if part.spec.act_bits == 16:
            return DenseLinear(part.to(self.device).dequantize(), part.bias)
        if self.name == "w4a8" and part.spec.act_bits == 4:
            # the clip was chosen for 15 levels; with 255 the whole range fits
            return replace(part, spec=replace(part.spec, act_bits=8, act_clip=1.0))
        return part


@dataclass
class DenseProjection:
    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]


@dataclass
class Acts:
    """What the quantizer makes of ``[M, K]``, in the projection's layout."""

    qact: torch.Tensor
    a_scales: torch.Tensor
    lora_act: torch.Tensor | None
    token_scales: torch.Tensor
    tokens: int


@dataclass
class PackedProjection:
    """A quantized linear in the layout of the kernel family that runs it."""

    linear: QuantizedLinear  # its tensors in that layout; spec and sizes as on disk
    layout: str
    out_features: int
    inv_smooth: torch.Tensor | None
    segment_ends: tuple[int, ...] | None = None  # with several low-rank branches (fuse.segments)

    @classmethod
    def pack(
        cls, linear: QuantizedLinear, layout: str, dtype: torch.dtype, segment_ends: tuple[int, ...] = ()
    ) -> PackedProjection:
        """Repack; the canonical weight is not kept.

        Raises:
            LayoutError: the layout does not fit the linear.
        """
        spec, branches = linear.spec, linear.proj_down
        if branches is not None and segment_ends:
            linear = replace(linear, proj_down=branches[:, : spec.rank])
        inv_smooth = None if linear.smooth is None else linear.smooth.float().reciprocal()
        if layout != ops.CANONICAL:
            family = repack.get(layout)
            if reason := family.unsupported(spec):
                raise LayoutError(f"layout {layout!r} cannot run a linear: {reason}")
            packed = {name: t for name, t in family.pack(linear).items() if name != "smooth"}
            if branches is not None and segment_ends:
                packed["proj_down"] = wgmma_s8.pack_proj_down(branches)
            for name in ("proj_down", "proj_up", "bias"):
                if name in packed:
                    packed[name] = packed[name].to(dtype)
            out = QuantizedLinear(spec, **packed)
        else:
            out = replace(linear, proj_down=branches, smooth=None)
        return cls(out, layout, linear.out_features, inv_smooth, segment_ends or None)

    def quantize(self, x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0) -> Acts:
        """Codes of ``x [M, K]``, with a norm weight those of its RMSNorm."""
        spec = self.linear.spec
        qact, a_scales, lora_act, token_scales = ops.quantize_lora_down(
            x, self.linear.proj_down, self.inv_smooth, None, norm_weight, spec.rotation, spec.act_bits,
            spec.act_clip, self.layout, spec.scale_type, eps, True,
        )  # fmt: skip
        return Acts(qact, a_scales, None if self.linear.proj_up is None else lora_act, token_scales, x.shape[0])

    def gemm(
        self, acts: Acts, dtype: torch.dtype, epilogue: str = "plain", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        linear = self.linear
        return ops.gemm_lora_up(
            acts.qact, acts.a_scales, linear.qweight, linear.w_scales, acts.lora_act, linear.proj_up, linear.bias,
            residual, acts.tokens, self.out_features, linear.spec.act_bits, epilogue, dtype, self.layout,
            linear.row_scales, acts.token_scales, self.segment_ends, True,
        )  # fmt: skip

    def gemm_qknorm_rope(
        self, acts: Acts, dtype: torch.dtype, norms: LayerNorms, rotary: Rotary, config: Qwen3Config
    ) -> torch.Tensor:
        """The same, then q/k norm and rotary embedding, in the epilogue where the family has that."""
        linear = self.linear
        return ops.gemm_qknorm_rope(
            acts.qact, acts.a_scales, linear.qweight, linear.w_scales, acts.lora_act, linear.proj_up, linear.bias,
            norms.q_norm, norms.k_norm, rotary.cos, rotary.sin, rotary.positions, config.num_heads,
            config.num_kv_heads, config.head_dim, config.eps, acts.tokens, linear.spec.act_bits, dtype, self.layout,
            linear.row_scales, acts.token_scales, self.segment_ends, True,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.gemm(self.quantize(x), x.dtype)

    def tensors(self) -> list[torch.Tensor]:
        extra = [] if self.inv_smooth is None else [self.inv_smooth]
        return [*self.linear.tensors().values(), *extra]


Projection = DenseProjection | PackedProjection


class W4Layer:
    def __init__(self, weights: LayerWeights, config: Qwen3Config, backend: W4Backend) -> None:
        self.config, self.dtype = config, backend.dtype
        self.norms = LayerNorms(weights, backend.device, backend.dtype)
        path = weights.path
        self.qkv_proj = backend.fuse(path, ("q", "k", "v"), [weights.q, weights.k, weights.v], interleave=False)
        self.gate_up_proj = backend.fuse(path, ("gate", "up"), [weights.gate, weights.up], interleave=True)
        self.o_proj = backend.fuse(path, ("o",), [weights.o], interleave=False)[0]
        self.down_proj = backend.fuse(path, ("down",), [weights.down], interleave=False)[0]

    def qkv(self, stream: Residual, rotary: Rotary) -> tuple[torch.Tensor, Residual]:
        whole = self.qkv_proj[0]
        if len(self.qkv_proj) == 1 and isinstance(whole, PackedProjection):
            acts, stream = self._quantized_norm(whole, stream, self.norms.input_norm)
            if acts.tokens <= HEADS_IN_PRODUCT:
                return whole.gemm_qknorm_rope(acts, self.dtype, self.norms, rotary, self.config), stream
            qkv = whole.gemm(acts, self.dtype)
            self.norms.rotate(qkv, rotary, self.config)
            return qkv, stream
        x, stream = self.norms.before(stream, self.norms.input_norm, self.config.eps)
        qkv = torch.cat([projection(x) for projection in self.qkv_proj], dim=1)
        self.norms.rotate(qkv, rotary, self.config)
        return qkv, stream

    def output(self, attended: torch.Tensor, stream: Residual) -> Residual:
        return self._added(self.o_proj, attended, stream)

    def mlp(self, stream: Residual) -> Residual:
        whole = self.gate_up_proj[0]
        if len(self.gate_up_proj) == 1 and isinstance(whole, PackedProjection):
            acts, stream = self._quantized_norm(whole, stream, self.norms.post_norm)
            gated = whole.gemm(acts, self.dtype, "swiglu")
        else:
            x, stream = self.norms.before(stream, self.norms.post_norm, self.config.eps)
            gated = ops.swiglu(torch.cat([projection(x) for projection in self.gate_up_proj], dim=1), False)[0]
        return self._added(self.down_proj, gated, stream)

    def tensors(self) -> Sequence[torch.Tensor]:
        projections = [*self.qkv_proj, self.o_proj, *self.gate_up_proj, self.down_proj]
        return [tensor for projection in projections for tensor in projection.tensors()]

    def _quantized_norm(
        self, projection: PackedProjection, stream: Residual, weight: torch.Tensor
    ) -> tuple[Acts, Residual]:
        if stream.delta is None:
            return projection.quantize(stream.hidden, weight, self.config.eps), stream
        x, stream = self.norms.before(stream, weight, self.config.eps)
        return projection.quantize(x), stream

    def _added(self, projection: Projection, x: torch.Tensor, stream: Residual) -> Residual:
        if isinstance(projection, DenseProjection):
            return Residual(stream.hidden, projection(x))
        return Residual(projection.gemm(projection.quantize(x), self.dtype, "residual", stream.hidden))
