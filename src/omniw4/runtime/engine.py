"""``Qwen3Engine``: a Qwen3 backbone in the form that runs fastest, behind one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from omniw4.checkpoint import Checkpoint
from omniw4.errors import OpError, UsageError
from omniw4.runtime import attention, backends, qwen3_weights
from omniw4.runtime.qwen3 import Qwen3Backbone, Qwen3Config, Qwen3Weights

BUCKETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EngineMemory:
    """Bytes an engine holds."""

    weights: int  # of the layers' linears, as packed, low-rank branch and bias included
    other: int  # norms and rotary tables
    buffers: int  # static inputs and outputs, and the graphs' pool

    @property
    def total(self) -> int:
        return self.weights + self.other + self.buffers


class Qwen3Engine:
    """The backbone of a Qwen3 on packed tokens.

    ``engine(hidden [P, H], positions [P], cu_seqlens [B + 1]) -> [P, H]``, hidden states behind the final norm.

    Attributes:
        config: sizes of the backbone.
        backend: name of the linear back end. dtype: of hidden states. device: where it runs.
        attention: name of the attention provider.
    """

    def __init__(
        self,
        weights: Qwen3Weights,
        *,
        backend: str,
        causal: bool = False,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = 16,
        device: torch.device,
        dtype: torch.dtype,
        attention_provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if list(buckets) != sorted(set(buckets)) or any(size < 1 for size in buckets):
            raise UsageError(f"buckets are {list(buckets)}, wanted rising positive numbers of tokens")
        config = weights.config
        made = backends.make(backend, device, dtype)
        spec = attention.AttentionSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, causal, config.head_dim**-0.5
        )
        provider = attention.choose(spec, device, made.dtype, attention_provider)
        self.backbone = Qwen3Backbone.build(weights, made, provider, device)
        self.config: Qwen3Config = config
        self.backend, self.dtype, self.device, self.attention = made.name, made.dtype, device, provider.name

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        checkpoint: str | Path | Checkpoint | None = None,
        *,
        backend: str = "fp16",
        causal: bool = False,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = 16,
        device: torch.device | str | None = None,
        attention_provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Qwen3Engine:
        """Build an engine from a Hugging Face model.

        Args:
            model: a Qwen3Model, or a model with one as ``model`` (a causal LM) or ``llm`` (OmniVoice), quantized or not.
            checkpoint: a folder of ``omniw4 quantize``, whose linears take the place of the model's.
            backend: "fp16", "bf16", "fp8", "w4a4", "w4a8" or "reference" (plain torch, runs anywhere).
            causal: whether a token attends to earlier ones only; False: to its whole sequence.
            buckets: numbers of tokens to capture graphs for; inputs are padded to the next one.
            max_sequences: how many sequences a captured call can hold.
            device: where to run; None: where the model is.
            attention_provider: a name of :mod:`omniw4.runtime.attention`; None for the fastest that runs.
            on_progress: called with (done, total, what) while graphs are captured.

        Raises:
            ModelError: no Qwen3 backbone, one with parts the engine does not have, or linears that do not fit the
                back end.
            UsageError: an unknown back end or provider, or one that does not run on the device.
            CheckpointError: the checkpoint breaks a rule of its format.
        """
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        weights = qwen3_weights.from_model(model, checkpoint)
        target = weights.norm.device if device is None else torch.device(device)
        return cls(
            weights, backend=backend, causal=causal, buckets=buckets, max_sequences=max_sequences, device=target,
            dtype=weights.norm.dtype, attention_provider=attention_provider, on_progress=on_progress,
        )  # fmt: skip

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the final norm.

        Args:
            hidden: ``[P, H]`` of the engine's dtype, embeddings of the tokens of all sequences, one behind the other.
            positions: ``[P]`` int64, each token's position in its sequence.
            cu_seqlens: ``[B + 1]`` int32, where each sequence begins, and P.

        Returns:
            ``[P, H]``, a new tensor.

        Raises:
            OpError: shapes, dtypes or devices that do not fit.
        """
        self._check(hidden, positions, cu_seqlens)
        if hidden.shape[0] == 0:
            return hidden.clone()
        return self.forward(hidden, positions, cu_seqlens, hidden.shape[0])

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        """The forward as it is, without buckets, for callers that capture a graph of their own around it.

        It never waits for the GPU. ``max_seqlen`` is at least the length of the longest sequence; rows of ``hidden``
        that no sequence contains must be finite, and their results mean nothing.
        """
        with torch.inference_mode():
            return self.backbone(hidden, positions, cu_seqlens, max_seqlen)

    def memory(self) -> EngineMemory:
        """What the engine holds on its device."""
        weights = sum(_bytes(layer.tensors()) for layer in self.backbone.layers)
        other = _bytes([self.backbone.norm, self.backbone.cos, self.backbone.sin])
        return EngineMemory(weights, other, 0)

    def _check(self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        tokens, width = hidden.shape[0], self.config.hidden_size
        wanted = {
            "hidden": (hidden, (tokens, width), self.dtype),
            "positions": (positions, (tokens,), torch.int64),
            "cu_seqlens": (cu_seqlens, (cu_seqlens.numel(),), torch.int32),
        }
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise OpError(f"engine: {name} has shape {list(tensor.shape)}, wanted {list(shape)}")
            if tensor.dtype != dtype:
                raise OpError(f"engine: {name} has dtype {tensor.dtype}, wanted {dtype}")
            if tensor.device != self.device:
                raise OpError(f"engine: {name} is on {tensor.device}, the engine on {self.device}")
        if cu_seqlens.numel() < 2:
            raise OpError(f"engine: cu_seqlens has {cu_seqlens.numel()} entries, wanted one more than sequences")


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of distinct storages: views of one tensor count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
