"""Many steps of a quantized linear with random lengths: the same bits as at first, and no growth in memory."""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from omniw4.runtime.linear import W4A4Linear
from problems import make_input, make_linear

Step = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 192


@dataclass(frozen=True)
class Soak:
    """What a series of steps came upon."""

    steps: int
    lengths: int  # distinct ones
    growth: int  # bytes, from when every length had been seen
    differing: int  # steps whose result was another than the first time


def linear(device: torch.device, act_bits: int = 4, n: int = 256) -> W4A4Linear:
    module = W4A4Linear(make_linear(n, WIDTH, act_bits=act_bits, smooth=True)).to(device)
    module.prepare()
    return module


def run(step: Step, device: torch.device, steps: int, *, width: int = WIDTH, most: int = 700, seed: int = 0) -> Soak:
    """Call ``step`` with inputs ``[tokens, width]`` of random lengths, some odd, some one token."""
    rng = random.Random(seed)
    lengths = sorted({1, 2, 3, most, *(rng.randint(1, most) for _ in range(24))})
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    inputs = {m: make_input(m, width, dtype, seed=m).to(device) for m in lengths}
    first: dict[int, str] = {}
    differing, begin = 0, 0
    for number in range(steps):
        m = rng.choice(lengths)
        digest = _digest(step(inputs[m]))
        differing += first.setdefault(m, digest) != digest
        if not begin and number >= steps // 10 and len(first) == len(lengths):
            begin = allocated(device)
    assert begin, "too few steps to see every length"
    return Soak(steps, len(first), allocated(device) - begin, differing)


def allocated(device: torch.device) -> int:
    """Bytes that torch holds on a GPU, or that the process has in memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_reserved(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _digest(y: torch.Tensor) -> str:
    return hashlib.blake2b(y.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
