"""The Qwen3 backbone on packed tokens: its configuration, its weights, its forward. How a linear is computed is a back
end's affair (:mod:`omniw4.runtime.backends`), how tokens attend is :mod:`omniw4.runtime.attention`'s.

Packed means that the tokens of all sequences lie one behind the other in ``hidden [P, H]``; sequence i is rows
``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. There is no padding inside, and no key/value cache.

Source: the architecture is transformers' ``modeling_qwen3``; packing with ``cu_seqlens`` as in FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from omniw4 import ops
from omniw4.errors import ModelError
from omniw4.tensors import QuantizedLinear


@dataclass(frozen=True)
class Qwen3Config:
    """What the forward must know of a Hugging Face configuration.

    ``inv_freq`` holds head_dim/2 inverse frequencies, or None for ``rope_theta^(-2j/head_dim)``.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    rope_theta: float
    max_positions: int
    inv_freq: tuple[float, ...] | None = None
    rope_scaling: float = 1.0

    @property
    def qkv_features(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, config: Any) -> Qwen3Config:
        """Read a ``transformers.Qwen3Config`` (or one with its fields).

        Raises:
            ModelError: a field is missing, or asks for what this forward does not do: another activation than SiLU,
                sliding windows, rotary embeddings that depend on the length.
        """
        found = {name: getattr(config, name, None) for name in _FIELDS}
        if missing := [name for name, value in found.items() if value is None]:
            raise ModelError(
                f"a {type(config).__name__} has no {', '.join(missing)}, the fields of a Qwen3 are wanted",
                hint="the engine runs Qwen3 backbones; other models run through `omniw4.load`",
            )
        if config.hidden_act not in ("silu", "swish"):
            raise ModelError(f"the model's hidden_act is {config.hidden_act!r}, the engine has 'silu' only")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ModelError("the model attends within sliding windows, the engine over whole sequences only")
        rope = getattr(config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ModelError(
                f"the model's rotary embedding is {kind!r}, the engine has {', '.join(_ROPE_TYPES)}: "
                "frequencies that depend on the length cannot be tabulated"
            )
        theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            rope_theta=10000.0 if theta is None else float(theta),
            max_positions=config.max_position_embeddings,
        )


_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps", "hidden_act",
    "max_position_embeddings",
)  # fmt: skip
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass
class DenseLinear:
    """A linear that is not quantized."""

    weight: torch.Tensor  # [N, K] float
    bias: torch.Tensor | None = None  # [N]
    owner: nn.Linear | None = None  # the module it is the weight of

    def adopt(self, rows: torch.Tensor) -> None:
        """Let the module use these rows of a stacked weight, equal to its own, when they are of its kind and place."""
        if self.owner is not None and (rows.dtype, rows.device) == (self.weight.dtype, self.weight.device):
            self.owner.weight.data = rows
            self.weight = rows

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


Linear = DenseLinear | QuantizedLinear


@dataclass
class LayerWeights:
    """One layer, with its path in the model for messages. A back end fuses q, k, v and gate, up as it wants them."""

    path: str
    input_norm: torch.Tensor  # [H]
    q: Linear
    k: Linear
    v: Linear
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: Linear
    post_norm: torch.Tensor  # [H]
    gate: Linear
    up: Linear
    down: Linear


@dataclass
class Qwen3Weights:
    """A backbone. ``layers`` may be read once only: it hands over one layer at a time, so that packing a checkpoint
    needs the memory of one layer beside the packed ones."""

    config: Qwen3Config
    layers: Iterable[LayerWeights]
    norm: torch.Tensor  # [H]


class Residual(NamedTuple):
    """The residual stream: ``hidden + delta``, where a back end that cannot add in a GEMM's epilogue leaves the sum to
    the next norm; None is zero."""

    hidden: torch.Tensor  # [P, H]
    delta: torch.Tensor | None = None  # [P, H]


@dataclass
class Rotary:
    """Rotary embedding of one call: tables for all positions and the position of each token."""

    cos: torch.Tensor  # [max_positions, D/2] float32
    sin: torch.Tensor  # [max_positions, D/2] float32
    positions: torch.Tensor  # [P] int64


class Layer(Protocol):
    """One layer in the form of a back end. Inputs are not changed, but for the residual stream, which is consumed."""

    def qkv(self, stream: Residual, rotary: Rotary) -> tuple[torch.Tensor, Residual]:
        """Norm, q/k/v linear, q/k norm, rotary embedding: ``[P, (Hq + 2·Hkv)·D]``, and the stream as it is now."""

    def output(self, attended: torch.Tensor, stream: Residual) -> Residual:
        """Output linear of ``[P, Hq·D]``, added to the stream."""

    def mlp(self, stream: Residual) -> Residual:
        """Norm, gate and up, SwiGLU, down, added to the stream."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """The weights it holds."""


class Backend(Protocol):
    """How linears are computed: makes layers. ``name`` is what reports call it, ``dtype`` that of hidden states."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def layer(self, weights: LayerWeights, config: Qwen3Config) -> Layer: ...

    def start(self, hidden: torch.Tensor) -> Residual:
        """The stream of ``hidden [P, H]``, which must still hold its values afterwards."""

    def norm(self, stream: Residual, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of the stream, ``[P, H]``."""


class Attention(Protocol):
    """``qkv [P, (Hq + 2·Hkv)·D] -> [P, Hq·D]``; tokens attend within their sequence."""

    @property
    def name(self) -> str: ...

    def __call__(self, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor: ...


@dataclass
class Qwen3Backbone:
    """The forward over layers that a back end has made. Nothing in it waits for the GPU or allocates on the host's
    account, so it can be captured in a CUDA graph."""

    config: Qwen3Config
    backend: Backend
    attention: Attention
    layers: list[Layer]
    norm: torch.Tensor  # [H]
    cos: torch.Tensor  # [max_positions, D/2] float32
    sin: torch.Tensor  # [max_positions, D/2] float32

    @classmethod
    def build(
        cls, weights: Qwen3Weights, backend: Backend, attention: Attention, device: torch.device
    ) -> Qwen3Backbone:
        config = weights.config
        layers = [backend.layer(layer, config) for layer in weights.layers]
        cos, sin = (table.to(device) for table in rotary_tables(config))
        return cls(config, backend, attention, layers, weights.norm.to(device, backend.dtype), cos, sin)

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        """``[P, H]`` of the back end's dtype to the same, behind the final norm.

        Args:
            hidden: ``[P, H]``; not changed.
            positions: ``[P]`` int64.
            cu_seqlens: ``[B + 1]`` int32, from 0 to P.
            max_seqlen: at least the longest sequence.
        """
        rotary = Rotary(self.cos, self.sin, positions)
        stream = self.backend.start(hidden)
        for layer in self.layers:
            qkv, stream = layer.qkv(stream, rotary)
            attended = self.attention(qkv, cu_seqlens, max_seqlen)
            stream = layer.output(attended, stream)
            stream = layer.mlp(stream)
        return self.backend.norm(stream, self.norm, self.config.eps)


def rotary_tables(config: Qwen3Config) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each ``[max_positions, D/2]`` float32, computed in FP64."""
    if config.inv_freq is None:
        return ops.rope_tables(config.max_positions, config.head_dim, config.rope_theta)
    frequencies = torch.tensor(config.inv_freq, dtype=torch.float64)
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequencies
    return (angles.cos() * config.rope_scaling).float(), (angles.sin() * config.rope_scaling).float()
