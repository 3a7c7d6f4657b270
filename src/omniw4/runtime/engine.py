"""``Qwen3Engine``: a Qwen3 backbone in the form that runs fastest, behind one call::

engine = Qwen3Engine.from_model(model, backend="fp16")                      # any Qwen3 of transformers
engine = Qwen3Engine.from_model(model, "checkpoint/", backend="w4a4")       # with quantized linears
hidden = engine(hidden, positions, cu_seqlens)                              # packed tokens, behind the final norm
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError, OpError, UsageError
from omniw4.runtime import attention, backends, qwen3_weights
from omniw4.runtime.graph import Captured, GraphBuckets, OnProgress
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.qwen3 import Qwen3Backbone, Qwen3Config, Qwen3Weights

BUCKETS = (*range(128, 1024, 64), *range(1024, 2048 + 1, 256))  # fine, since a graph takes a twentieth of a second
MAX_SEQUENCES = 16
QUANTIZED = ("w4a4", "w4a8")


@dataclass(frozen=True)
class EngineMemory:
    """Bytes an engine holds on its device."""

    weights: int  # of the layers' linears as they run: codes, scales, low-rank branches, biases
    other: int  # norms and rotary tables
    buffers: int  # static inputs, and the pool of the graphs

    @property
    def total(self) -> int:
        return self.weights + self.other + self.buffers


@dataclass(frozen=True)
class StartUp:
    """What building an engine took."""

    weights_seconds: float  # reading, stacking, packing
    graphs_seconds: float
    buckets: tuple[Captured, ...]


class Qwen3Engine:
    """The backbone of a Qwen3 on packed tokens.

    ``engine(hidden [P, H], positions [P], cu_seqlens [B + 1]) -> [P, H]``, hidden states behind the final norm. Calls
    from several threads or streams run one after the other.

    Attributes:
        config: sizes of the backbone.
        backend: name of the linear back end. dtype: of hidden states. device: where it runs.
        attention: name of the attention provider.
        start_up: what building it took, bucket by bucket.
    """

    def __init__(
        self,
        weights: Qwen3Weights,
        *,
        backend: str,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool = False,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = MAX_SEQUENCES,
        layout: str | None = None,
        attention_provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if list(buckets) != sorted(set(buckets)) or any(size < 1 for size in buckets):
            raise UsageError(f"buckets are {list(buckets)}, wanted rising positive numbers of tokens")
        if max_sequences < 1:
            raise UsageError(f"max_sequences is {max_sequences}, wanted 1 or more")
        config = weights.config
        made = backends.make(backend, device, dtype, layout)
        spec = attention.AttentionSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, causal, config.head_dim**-0.5
        )
        provider = attention.choose(spec, device, made.dtype, attention_provider)
        started = time.perf_counter()
        with torch.no_grad():
            self.backbone = Qwen3Backbone.build(weights, made, provider, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # from here on no kernel writes weights, which the products count on
        built = time.perf_counter()
        self.config: Qwen3Config = config
        self.backend, self.dtype, self.device, self.attention = made.name, made.dtype, device, provider.name
        self.causal = causal
        self._buckets = None
        if buckets:
            self._buckets = GraphBuckets(
                self.forward, buckets, max_sequences=max_sequences, hidden_size=config.hidden_size, dtype=made.dtype,
                device=device, on_progress=on_progress,
            )  # fmt: skip
        captured = self._buckets.captured if self._buckets else []
        self.start_up = StartUp(built - started, time.perf_counter() - built, tuple(captured))
        self._warned = False

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        checkpoint: str | Path | Checkpoint | None = None,
        *,
        backend: str = "fp16",
        causal: bool = False,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = MAX_SEQUENCES,
        device: torch.device | str | None = None,
        layout: str | None = None,
        attention_provider: str | None = None,
        release: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Qwen3Engine:
        """Build an engine from a Hugging Face model.

        The dense back ends stack q, k, v and gate, up; the model's linears become views of the stacked weights, so that
        these are in memory once and the model still runs.

        Args:
            model: a Qwen3Model, or a model with one as ``model`` (a causal LM) or ``llm`` (OmniVoice); its linears may
                be quantized ones.
            checkpoint: a folder of ``omniw4 quantize``, whose linears take the place of the model's.
            backend: "fp16", "bf16", "fp8", "w4a4", "w4a8" or "reference" (:mod:`omniw4.runtime.backends`).
            causal: whether a token attends to earlier ones only; False: to its whole sequence.
            buckets: numbers of tokens to capture graphs for; inputs are padded to the next one. Empty for none.
            max_sequences: how many sequences a captured call can hold.
            device: where to run; None: where the model is.
            layout: kernel family of the quantized back ends; None for the best compiled for the device.
            attention_provider: a name of :mod:`omniw4.runtime.attention`; None for the fastest that runs.
            release: give back the memory of the model's own linears; the model itself does not run any more.
            on_progress: called with (done, total, what) while graphs are captured.

        Raises:
            ModelError: no Qwen3 backbone, one with parts the engine does not have, or linears that do not fit the
                back end.
            UsageError: an unknown back end or provider, or one that does not run on the device.
            CheckpointError: the checkpoint breaks a rule of its format.
        """
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        quantized = checkpoint is not None or any(isinstance(module, W4A4Linear) for module in model.modules())
        if backend in QUANTIZED and not quantized:
            raise ModelError(
                f"back end {backend!r} needs quantized linears, the model has none",
                hint="give the folder of `omniw4 quantize` as checkpoint, or choose fp16, bf16 or fp8",
            )
        weights = qwen3_weights.from_model(model, checkpoint)
        target = weights.norm.device if device is None else _indexed(torch.device(device))
        engine = cls(
            weights, backend=backend, device=target, dtype=weights.norm.dtype, causal=causal, buckets=buckets,
            max_sequences=max_sequences, layout=layout, attention_provider=attention_provider,
            on_progress=on_progress,
        )  # fmt: skip
        if release:
            qwen3_weights.release(model)
        return engine

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path | Checkpoint,
        *,
        backend: str = "w4a4",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float16,
        causal: bool = False,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = MAX_SEQUENCES,
        layout: str | None = None,
        attention_provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Qwen3Engine:
        """Build an engine from a checkpoint alone, one layer at a time: no Hugging Face model is made.

        Args:
            dtype: of hidden states, for the back ends w4a4, w4a8 and reference. The rest: :meth:`from_model`.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        target = _indexed(torch.device(place))
        weights = qwen3_weights.from_checkpoint(checkpoint, target)
        return cls(
            weights, backend=backend, device=target, dtype=dtype, causal=causal, buckets=buckets,
            max_sequences=max_sequences, layout=layout, attention_provider=attention_provider,
            on_progress=on_progress,
        )  # fmt: skip

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, *, replay: bool = True
    ) -> torch.Tensor:
        """Hidden states behind the final norm.

        Args:
            hidden: ``[P, H]`` of the engine's dtype, embeddings of the tokens of all sequences, one behind the other.
            positions: ``[P]`` int64, each token's position in its sequence.
            cu_seqlens: ``[B + 1]`` int32, from 0, where each sequence begins, and P.
            replay: False runs without the graph, padded alike: for comparison.

        Returns:
            ``[P, H]``, a new tensor.

        Raises:
            OpError: shapes, dtypes or devices that do not fit.
        """
        self._check(hidden, positions, cu_seqlens)
        tokens, sequences = hidden.shape[0], cu_seqlens.shape[0] - 1
        if tokens == 0:
            return hidden.clone()
        bucket = self._buckets.bucket(tokens, sequences) if self._buckets else None
        if self._buckets is not None and bucket is not None:
            with torch.no_grad():
                return self._buckets.run(bucket, hidden, positions, cu_seqlens, replay=replay)
        if self._buckets is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"an input of {tokens} tokens in {sequences} sequences is beyond the engine's largest bucket, "
                f"{self._buckets.sizes[-1]} tokens in {self._buckets.max_sequences} sequences: it runs uncaptured, "
                "and slower",
                stacklevel=2,
            )
        return self.forward(hidden, positions, cu_seqlens, tokens)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        """The forward as it is, without buckets, for callers that capture a graph of their own around it.

        It never waits for the GPU. ``max_seqlen`` is at least the length of the longest sequence; rows of ``hidden``
        that no sequence contains must be finite, and their results mean nothing.
        """
        with torch.no_grad():
            return self.backbone(hidden, positions, cu_seqlens, max_seqlen)

    def memory(self) -> EngineMemory:
        """What the engine holds on its device."""
        weights = _bytes([tensor for layer in self.backbone.layers for tensor in layer.tensors()])
        other = _bytes([self.backbone.norm, self.backbone.cos, self.backbone.sin])
        return EngineMemory(weights, other, self._buckets.bytes() if self._buckets else 0)

    def _check(self, hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        if hidden.dim() != 2 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise OpError(
                f"engine: hidden is {list(hidden.shape)} and cu_seqlens {list(cu_seqlens.shape)}, wanted [P, H] and "
                "[B + 1] with at least one sequence"
            )
        tokens = hidden.shape[0]
        wanted = {
            "hidden": (hidden, (tokens, self.config.hidden_size), self.dtype),
            "positions": (positions, (tokens,), torch.int64),
            "cu_seqlens": (cu_seqlens, tuple(cu_seqlens.shape), torch.int32),
        }
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise OpError(f"engine: {name} has shape {list(tensor.shape)}, wanted {list(shape)}")
            if tensor.dtype != dtype:
                raise OpError(f"engine: {name} has dtype {tensor.dtype}, wanted {dtype}")
            if tensor.device != self.device:
                raise OpError(f"engine: {name} is on {tensor.device}, the engine on {self.device}")
        if not cu_seqlens.is_cuda:  # on a GPU, looking would mean waiting for it
            ends = cu_seqlens.tolist()
            if ends != sorted(ends) or ends[0] != 0 or ends[-1] != tokens:
                raise OpError(f"engine: cu_seqlens is {ends}, wanted numbers that rise from 0 to {tokens}")


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` as tensors name it, with its index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of distinct memory: a tensor that two layers share counts once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())
