"""Decoding of whole batches: prompts in, codes out, through CUDA graphs captured for a few sizes at start-up.

One graph holds one step; it is replayed once a step and the host waits for nothing in between, so that it is ahead of
the GPU all the time. A batch runs in the smallest captured size that holds it. What no size holds, and settings that
the graphs do not have, run the same step uncaptured. On a CPU nothing is captured or padded.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omniw4.cuda_graph import capture
from omniw4.runtime.omnivoice.packing import Packing, Size, needed, pack
from omniw4.runtime.omnivoice.step import DecodeState, Parts, Sampling, decode_step, decode_step_free

BUCKETS = (  # fine, since a graph takes a twentieth of a second and a step as long as its bucket
    *range(128, 768, 64), *range(768, 1024, 128), *range(1024, 2048, 256), *range(2048, 6144 + 1, 512),
)  # fmt: skip
_LARGEST_SINGLE, _SMALLEST_BATCH = 2048, 256  # the package cuts text that takes longer than 30 s
MAX_REQUESTS = 16
MAX_STEPS = 64

OnProgress = Callable[[int, int, str], None]
Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids [1, C, P], audio mask [1, P] -> [1, P, H]


@dataclass(frozen=True)
class Prompt:
    """One request as the package prepares it."""

    ids: torch.Tensor  # [C, tokens] int64; of text the same in every codebook
    audio: torch.Tensor  # [tokens] bool, where ids are codes
    target: int  # of the tokens, at the end: what is decoded

    @property
    def request(self) -> tuple[int, int]:
        return self.ids.shape[1], self.target


@dataclass
class StartUp:
    """What capturing took."""

    seconds: float = 0.0
    bytes: int = 0  # static tensors and the graphs' memory
    sizes: list[dict[str, Any]] = field(default_factory=list)  # tokens, requests, seconds, bytes of each graph


class Decoder:
    """Iterative decoding of an OmniVoice.

    Args:
        parts: how a step gets from codes to logits.
        embed: the package's embedding of packed ids.
        template: ``[1, H]``, for width, dtype and device of hidden states.
        buckets: packed tokens to capture graphs for; a request alone is kept apart from batches, whose graphs hold up
            to ``max_requests``.
        max_steps: the longest schedule a graph takes.
        on_progress: called with (done, total, what) while graphs are captured.
    """

    def __init__(
        self,
        parts: Parts,
        embed: Embed,
        template: torch.Tensor,
        *,
        buckets: Sequence[int] = BUCKETS,
        max_requests: int = MAX_REQUESTS,
        max_steps: int = MAX_STEPS,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.parts, self._embed, self._template = parts, embed, template
        self._graphs: list[tuple[DecodeState, torch.cuda.CUDAGraph]] = []
        self._warned: set[str] = set()
        self._lock = threading.Lock()  # the graphs' tensors are one call's at a time
        self.start_up = StartUp()
        if template.is_cuda:
            self._capture(_sizes(buckets, max_requests), max_steps, on_progress)

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[torch.Tensor]:
        """The codes of every request, ``[C, target]`` int64, all of them unmasked."""
        requests = [prompt.request for prompt in prompts]
        targets = [prompt.target for prompt in prompts]
        exact = needed(requests, guided=sampling.guided)
        captured = self._captured_for(exact, sampling)
        size = captured[0].size if captured else exact
        packing = pack(requests, self.parts.codebooks, size, guided=sampling.guided)
        base = self._embed_packed(prompts, guided=sampling.guided)
        if captured is None:
            state = DecodeState(size, self.parts.codebooks, sampling.num_step, self._template, self.parts.mask_id)
            state.load(packing, base, targets, sampling)
            for _ in range(sampling.num_step):
                decode_step_free(state, self.parts, sampling)
            return state.codes(targets)
        state, graph = captured
        with self._lock, torch.cuda.device(self._template.device):
            state.load(packing, base, targets, sampling)
            for _ in range(sampling.num_step):
                graph.replay()
            return state.codes(targets)

    def _embed_packed(self, prompts: Sequence[Prompt], *, guided: bool) -> torch.Tensor:
        """``[P, H]``: every prompt, each followed by its target alone."""
        rows = [(prompt.ids, prompt.audio) for prompt in prompts]
        if guided:
            twins = [(prompt.ids[:, -prompt.target :], prompt.audio[-prompt.target :]) for prompt in prompts]
            rows = [row for pair in zip(rows, twins, strict=True) for row in pair]
        ids, audio = torch.cat([ids for ids, _ in rows], 1), torch.cat([audio for _, audio in rows])
        return self._embed(ids[None], audio[None])[0]

    def _captured_for(self, exact: Size, sampling: Sampling) -> tuple[DecodeState, torch.cuda.CUDAGraph] | None:
        if not self._graphs:
            return None
        largest = self._graphs[-1][0]
        if sampling.class_temperature > 0:
            self._warn("class_temperature above 0 is not in the captured graphs")
            return None
        if sampling.num_step > largest.steps:
            self._warn(f"num_step {sampling.num_step} is above the {largest.steps} of the captured graphs")
            return None
        found = next((entry for entry in self._graphs if entry[0].size.holds(exact)), None)
        if found is None:
            batch = f"requests and packed tokens of a batch are {exact.requests} and {exact.tokens}"
            self._warn(f"{batch}, the largest graph's {largest.size.requests} and {largest.size.tokens}")
        return found

    def _warn(self, reason: str) -> None:
        kind = reason.split(" ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{reason}: decoding runs uncaptured, and slower", stacklevel=4)

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[Size], steps: int, on_progress: OnProgress | None) -> None:
        """Capture the largest first: the others fit into the memory that it leaves in the pool."""
        device = self._template.device
        torch.cuda.empty_cache()  # as every capture does, which would hide what the graphs take
        began, before = time.perf_counter(), torch.cuda.memory_reserved(device)
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device), torch.random.fork_rng([device]):
            for done, size in enumerate(reversed(sizes), start=1):
                started, held = time.perf_counter(), torch.cuda.memory_reserved(device)
                state = DecodeState(size, self.parts.codebooks, steps, self._template, self.parts.mask_id)
                state.load(_some_batch(size, self.parts.codebooks), self._template[:0], _some_targets(size), Sampling())
                self._graphs.insert(0, (state, _captured_step(state, self.parts, pool, warm=done == 1)))
                self.start_up.sizes.insert(
                    0,
                    {
                        "tokens": size.tokens,
                        "requests": size.requests,
                        "seconds": time.perf_counter() - started,
                        "bytes": torch.cuda.memory_reserved(device) - held,
                    },
                )
                if on_progress is not None:
                    on_progress(done, len(sizes), f"{size.tokens} tokens, {size.requests} requests")
        self.start_up.seconds = time.perf_counter() - began
        self.start_up.bytes = torch.cuda.memory_reserved(device) - before


def _sizes(buckets: Sequence[int], max_requests: int) -> list[Size]:
    """Sizes for a single request and for batches, from small to large.

    A target is in two rows, so that half of the tokens bounds the targets.
    """
    sizes = []
    for tokens in sorted(buckets):
        for count in sorted({1, max_requests}):
            if max_requests == 1 or (tokens <= _LARGEST_SINGLE if count == 1 else tokens >= _SMALLEST_BATCH):
                sizes.append(Size(tokens, -(-tokens // 2), count))
    return sizes


def _some_targets(size: Size) -> list[int]:
    return [max(1, size.targets // size.requests)] * min(size.requests, size.targets)


def _some_batch(size: Size, codebooks: int) -> Packing:
    """A batch without text that fills a size, to capture with."""
    return pack([(target, target) for target in _some_targets(size)], codebooks, size)


def _captured_step(state: DecodeState, parts: Parts, pool: Any, *, warm: bool) -> torch.cuda.CUDAGraph:
    """Run a step on a side stream, as libraries set themselves up at their first call, then capture one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2 if warm else 1):
            decode_step(state, parts)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    state.step.zero_()
    graph = torch.cuda.CUDAGraph()
    with capture(graph, pool=pool):
        decode_step(state, parts)
    return graph
