"""The engine on a GPU: replay is eager, bit for bit; memory stays where it is; every back end is the same model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from omniw4.bench import backbone as bench
from omniw4.bench.omnivoice import with_random_quantized
from omniw4.runtime import Qwen3Engine, accelerate, restore
from omniw4.tensors import LinearSpec
from problems import assert_same, relative_error

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SIZES = {**bench.SIZES, "num_hidden_layers": 3}
BACKENDS = ("fp16", "bf16", "fp8", "w4a4", "w4a8")
TOLERANCES = {"fp16": 5e-3, "bf16": 3e-2, "fp8": 0.2}


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    half = bench.random_backbone(SIZES, GPU, torch.float16)
    quantized = with_random_quantized(half, LinearSpec(scale_type="integer"))
    brain = bench.random_backbone(SIZES, GPU, torch.bfloat16)
    return {"fp16": half, "bf16": brain, "fp8": half, "w4a4": quantized, "w4a8": quantized}


def inputs(lengths: list[int], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(GPU).manual_seed(seed)
    hidden = torch.randn(sum(lengths), 1024, generator=g, device=GPU).to(dtype)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(GPU)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=GPU)
    return hidden, positions, ends


def random_lengths(rng: random.Random, tokens: int) -> list[int]:
    """Up to six sequences of ``tokens`` together, some of them of one token."""
    cuts = sorted(rng.sample(range(1, tokens), min(rng.randint(0, 5), tokens - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_is_eager_on_a_hundred_lengths(models: dict[str, Any], backend: str, causal: bool) -> None:
    engine = Qwen3Engine.from_model(
        models[backend], backend=backend, causal=causal, buckets=(64, 200, 512), max_sequences=6
    )
    rng = random.Random(0)
    for case in range(100):
        call = inputs(random_lengths(rng, rng.randint(1, 512)), engine.dtype, case)
        found, wanted = engine(*call), engine(*call, replay=False)
        assert found.isfinite().all()
        assert_same(found, wanted, f"case {case}, {call[0].shape[0]} tokens")


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_reference(models: dict[str, Any], backend: str) -> None:
    model = models[backend]
    engine = Qwen3Engine.from_model(model, backend=backend, buckets=(256,))
    call = inputs([100, 1, 60], engine.dtype)
    if backend.startswith("w4"):
        reference = Qwen3Engine.from_model(model, backend="reference", buckets=())
        tolerance = 0.1 if backend == "w4a4" else 0.3  # w4a8 has finer activations than the reference's four bits
        assert relative_error(engine(*call), reference(*call)) < tolerance
        return
    exact = Qwen3Engine.from_model(model, backend="reference", buckets=())
    assert relative_error(engine(*call), exact(*call)) < TOLERANCES[backend]


@pytest.mark.parametrize("backend", ["w4a4", "w4a8"])
def test_quantized_results_do_not_depend_on_company_or_bucket(models: dict[str, Any], backend: str) -> None:
    small = Qwen3Engine.from_model(models[backend], backend=backend, buckets=(64,))
    large = Qwen3Engine.from_model(models[backend], backend=backend, buckets=(512,))
    together = large(*inputs([100, 1, 60], small.dtype))
    hidden, positions, _ = inputs([100, 1, 60], small.dtype)
    alone = (hidden[101:], positions[101:], torch.tensor([0, 60], dtype=torch.int32, device=GPU))
    assert_same(small(*alone), together[101:], "alone in a smaller bucket")


@pytest.mark.parametrize("backend", ["fp16", "w4a4"])
def test_a_thousand_mixed_requests_leave_memory_where_it_was(models: dict[str, Any], backend: str) -> None:
    engine = Qwen3Engine.from_model(models[backend], backend=backend, buckets=(64, 200, 512), max_sequences=6)
    rng = random.Random(1)
    after: list[tuple[int, int]] = []
    for case in range(1000):
        engine(*inputs(random_lengths(rng, rng.randint(1, 512)), engine.dtype, case))
        if case in (49, 999):
            torch.cuda.synchronize()
            after.append((torch.cuda.memory_allocated(GPU), torch.cuda.memory_reserved(GPU)))
    assert after[0] == after[1]


def test_calls_from_two_streams_take_turns(models: dict[str, Any]) -> None:
    engine = Qwen3Engine.from_model(models["fp16"], backend="fp16", buckets=(512,))
    calls = [inputs([n], torch.float16, n) for n in (500, 400, 300)]
    wanted = [engine(*call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(engine(*call))
        torch.cuda.synchronize()
        for result, expected in zip(found, wanted, strict=True):
            assert_same(result, expected, "a call beside others")


def test_start_up_is_reported(models: dict[str, Any]) -> None:
    seen: list[tuple[int, int, str]] = []
    engine = Qwen3Engine.from_model(
        models["fp16"], backend="fp16", buckets=(64, 200), on_progress=lambda *event: seen.append(event)
    )
    assert seen == [(1, 2, "graph of 200 tokens"), (2, 2, "graph of 64 tokens")]
    assert [bucket.tokens for bucket in engine.start_up.buckets] == [64, 200]
    assert all(bucket.seconds > 0 for bucket in engine.start_up.buckets)
    assert engine.memory().buffers > 0
    with pytest.warns(UserWarning, match="201 tokens in 1 sequences is beyond"):
        assert engine(*inputs([201], torch.float16)).isfinite().all()


def test_weights_of_four_bits_take_less_than_a_third(models: dict[str, Any]) -> None:
    dense = Qwen3Engine.from_model(models["fp16"], backend="fp16", buckets=())
    packed = Qwen3Engine.from_model(models["w4a4"], backend="w4a4", buckets=())
    assert packed.memory().weights <= 0.30 * dense.memory().weights


def test_accelerated_transformers(models: dict[str, Any]) -> None:
    model = models["fp16"]
    embeds = inputs([128], torch.float16)[0].reshape(2, 64, 1024)
    mask = torch.ones(2, 64, dtype=torch.int64, device=GPU)
    mask[1, 50:] = 0
    with torch.no_grad():
        wanted = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state
        accelerate(model, backend="fp16", buckets=(128,))
        found = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
        restore(model)
    assert relative_error(found[mask.bool()], wanted[mask.bool()]) < 5e-3
    assert not found[1, 50:].any()
