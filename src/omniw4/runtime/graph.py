"""CUDA graphs for a few sizes, captured at start-up: a call is padded to the next one and replayed.

Padding never changes a result. Hidden states of padding are zero, its tokens form a sequence of their own, and nothing
in the forward mixes the rows of two sequences. Below, a call of 5 tokens in sequences of 3 and 2, in a bucket of 8 that
holds three sequences::

    hidden      a a a b b 0 0 0
    positions   0 1 2 0 1 0 0 0
    cu_seqlens  0 3 5 8 8           the sequence of the padding, and one that is empty

Buckets share one memory pool and one set of static inputs, since one call runs after the other: each waits for the one
before, whatever thread or stream it comes from. On a CPU there is nothing to capture; calls are padded all the same, so
that the arithmetic of padding is tested everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from omniw4.cuda_graph import capture

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Captured:
    """One bucket and what making it took."""

    tokens: int
    seconds: float
    bytes: int  # by which its capture made the pool grow


class GraphBuckets:
    """Static inputs, and for each bucket a graph with its output.

    Args:
        forward: ``(hidden [P, H], positions [P], cu_seqlens [B + 1], max_seqlen) -> [P, H]``; must not wait for the
            GPU.
        sizes: rising numbers of tokens, not empty.
        max_sequences: B that a call can have; a graph has room for one more, the padding.
        on_progress: called with (done, total, what).
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        *,
        max_sequences: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._forward, self.sizes, self.max_sequences = forward, tuple(sizes), max_sequences
        self._lock = threading.Lock()
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device
        largest = self.sizes[-1]
        self._hidden = torch.zeros(largest, hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._cu_seqlens = torch.zeros(max_sequences + 2, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self.captured: list[Captured] = []
        if device.type == "cuda":
            self._capture(device, on_progress)

    def bucket(self, tokens: int, sequences: int) -> int | None:
        """The size a call runs in; None when no graph holds it."""
        if sequences > self.max_sequences:
            return None
        return next((size for size in self.sizes if size >= tokens), None)

    def run(
        self,
        bucket: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        replay: bool = True,
    ) -> torch.Tensor:
        """The result of a call, ``[P, H]``, a new tensor.

        Args:
            replay: False runs the same kernels on the same padded inputs without the graph.
        """
        with self._lock, self._turn():
            tokens = hidden.shape[0]
            self._hidden[:tokens].copy_(hidden)
            self._positions[:tokens].copy_(positions)
            if tokens < bucket:
                self._hidden[tokens:bucket].zero_()
                self._positions[tokens:bucket].zero_()
            self._cu_seqlens.fill_(bucket)
            self._cu_seqlens[: cu_seqlens.shape[0]].copy_(cu_seqlens)
            if replay and bucket in self._graphs:
                self._graphs[bucket].replay()
                out = self._outputs[bucket]
            else:
                out = self._call(bucket)
            return out[:tokens].clone()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """On the device of the graphs, the current stream behind the call before."""
        if self._done is None:
            yield
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            yield
            self._done.record(stream)

    def bytes(self) -> int:
        """Static inputs, and what the graphs' pool holds."""
        inputs = (self._hidden, self._positions, self._cu_seqlens)
        return sum(t.numel() * t.element_size() for t in inputs) + sum(entry.bytes for entry in self.captured)

    def _call(self, bucket: int) -> torch.Tensor:
        return self._forward(self._hidden[:bucket], self._positions[:bucket], self._cu_seqlens, bucket)

    def _capture(self, device: torch.device, on_progress: OnProgress | None) -> None:
        """Largest first: the smaller ones then find their memory in the pool."""
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle()
            self._cu_seqlens.fill_(self.sizes[-1])
            self._cu_seqlens[0] = 0
            self._warm_up()
            for done, size in enumerate(reversed(self.sizes), 1):
                torch.cuda.empty_cache()  # capturing does it too, and would hide by how much the pool grew
                started, before = time.perf_counter(), torch.cuda.memory_reserved(device)
                graph = torch.cuda.CUDAGraph()
                with capture(graph, pool=pool, capture_error_mode="thread_local"):
                    self._outputs[size] = self._call(size)
                torch.cuda.synchronize(device)
                self._graphs[size] = graph
                grown = max(0, torch.cuda.memory_reserved(device) - before)
                self.captured.insert(0, Captured(size, time.perf_counter() - started, grown))
                if on_progress is not None:
                    on_progress(done, len(self.sizes), f"graph of {size} tokens")

    def _warm_up(self) -> None:
        """What a capture may not do, libraries do at their first call: load kernels, make handles and workspaces."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in (self.sizes[-1], self.sizes[0]):
                self._cu_seqlens[1:].fill_(size)
                self._call(size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
