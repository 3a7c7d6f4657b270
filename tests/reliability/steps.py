"""Many calls of a quantized linear, and of the engine, with random lengths: the same bits as at first, no growth in
memory."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from omniw4.bench import backbone
from omniw4.bench.omnivoice import round_to_nearest, with_random_quantized
from omniw4.runtime import Qwen3Engine
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, ScaleType
from problems import make_input, make_linear

Step = Callable[..., torch.Tensor]
Call = tuple[torch.Tensor, ...]
WIDTH = 192
BUCKETS = (64, 200, 512)
MAX_SEQUENCES = 6
TINY = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Soak:
    """What a series of steps came upon."""

    steps: int
    calls: int  # distinct ones
    growth: int  # bytes that the process, or torch on a GPU, holds more than when every call had been seen
    left: int  # of them, on a GPU, those that tensors are in
    differing: int  # steps whose result was another than the first time


def linear(device: torch.device, act_bits: int = 4, n: int = 256, *, scale_type: ScaleType = "float16") -> W4A4Linear:
    if scale_type == "integer":
        weight = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.05
        quantized = round_to_nearest(weight, LinearSpec(act_bits=act_bits, scale_type="integer"))
    else:
        quantized = make_linear(n, WIDTH, act_bits=act_bits, smooth=True)
    module = W4A4Linear(quantized).to(device)
    module.prepare()
    return module


def linear_calls(device: torch.device, most: int = 700, seed: int = 0) -> list[Call]:
    """``x [tokens, WIDTH]`` of random lengths, some odd, some one token."""
    rng = random.Random(seed)
    lengths = sorted({1, 2, 3, most, *(rng.randint(1, most) for _ in range(24))})
    return [(make_input(m, WIDTH, _dtype(device), seed=m).to(device),) for m in lengths]


def model(device: torch.device) -> nn.Module:
    """A backbone of two blocks: as wide as OmniVoice's on a GPU, tiny elsewhere."""
    sizes = {**backbone.SIZES, **({} if device.type == "cuda" else TINY), "num_hidden_layers": 2}
    return backbone.random_backbone(sizes, device, _dtype(device))


def engine(source: nn.Module, backend: str) -> Qwen3Engine:
    """With ``w4a4`` or ``reference``, of the same model with its linears quantized."""
    if backend != "fp16":
        source = with_random_quantized(source, LinearSpec(scale_type="integer"))
    return Qwen3Engine.from_model(source, backend=backend, causal=True, buckets=BUCKETS, max_sequences=MAX_SEQUENCES)


def engine_calls(made: Qwen3Engine, seed: int = 0) -> list[Call]:
    """Packed tokens: in every bucket, at its edges, beyond the largest, and in more sequences than a graph holds."""
    rng = random.Random(seed)
    most = BUCKETS[-1]
    edges = [1, 2, *(size + more for size in BUCKETS for more in (0, 1))]
    totals = sorted({*edges, most + 300, *(rng.randint(1, most) for _ in range(16))})
    lengths = [_sequences(rng, total, MAX_SEQUENCES) for total in totals]
    lengths += [[3] * (MAX_SEQUENCES + 1), [1] * (MAX_SEQUENCES + 5)]
    return [_packed(made, call, number) for number, call in enumerate(lengths)]


def run(step: Step, calls: Sequence[Call], device: torch.device, steps: int, *, seed: int = 0) -> Soak:
    """Call ``step`` with one of ``calls`` after another, at random; results are compared bit for bit."""
    rng = random.Random(seed)
    first: dict[int, torch.Tensor] = {}
    differing, begin = 0, None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*beyond the engine's largest bucket")
        for number in range(steps):
            which = rng.randrange(len(calls))
            found = step(*calls[which])
            bits = found.detach().contiguous().view(torch.uint8)
            if which not in first:
                first[which] = bits.clone()
            differing += not torch.equal(first[which], bits)
            del found, bits
            if begin is None and number >= steps // 10 and len(first) == len(calls):
                begin = memory(device)
    assert begin is not None, "too few steps to see every call"
    held, tensors = memory(device)
    return Soak(steps, len(first), held - begin[0], tensors - begin[1], differing)


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that torch holds on a GPU, and those that tensors are in; else those of the process, and 0."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096, 0


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


def _sequences(rng: random.Random, total: int, most: int) -> list[int]:
    """``total`` tokens in some sequences, now and then one of a single token."""
    cuts = sorted(rng.sample(range(1, total), min(rng.randint(0, most - 1), total - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _packed(made: Qwen3Engine, lengths: Sequence[int], seed: int) -> Call:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths), made.config.hidden_size, generator=g).to(made.device, made.dtype)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(made.device)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=made.device)
    return hidden, positions, ends
