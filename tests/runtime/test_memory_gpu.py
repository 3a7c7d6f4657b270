"""On a GPU a swapped model takes no new memory from the device once it is warm."""

from __future__ import annotations

import gc

import pytest
import torch

from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from problems import make_input, make_linear
from tiny_models import MODELS, quantize_blocks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def taken_from_device() -> tuple[int, int]:
    """Segments that torch's allocator asked the device for so far, and the bytes it holds of them."""
    stats = torch.cuda.memory_stats(GPU)
    return stats["segment.all.allocated"], stats["reserved_bytes.all.current"]


@pytest.mark.parametrize("act_bits", [4, 8])
def test_a_swapped_model_allocates_nothing_after_warm_up(act_bits: int) -> None:
    model = MODELS["qwen3"]()
    quantized = quantize_blocks(model, LinearSpec(act_bits=act_bits))
    model.to(GPU, torch.float16)
    swap(model, quantized)
    ids = torch.arange(48, device=GPU).reshape(2, 24)
    with torch.no_grad():
        for _ in range(3):
            model(ids)
        torch.cuda.synchronize()
        gc.collect()  # of what ran before
        before, in_use = taken_from_device(), torch.cuda.memory_allocated(GPU)
        for _ in range(50):
            model(ids)
        torch.cuda.synchronize()
    assert taken_from_device() == before
    assert torch.cuda.memory_allocated(GPU) == in_use


def test_replays_of_a_captured_linear_allocate_nothing() -> None:
    linear = W4A4Linear(make_linear(256, 192)).to(GPU)
    x = make_input(40, 192, torch.float16).to(GPU)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x)
    before = taken_from_device()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert taken_from_device() == before
    assert y.isfinite().all()
