"""One step of a Qwen3 backbone, every way of running it side by side: transformers as it is, in a CUDA graph, compiled
and in a graph, and the fused engine with each of its linear back ends.

The model has the size of OmniVoice's backbone and random weights, so that nothing is fetched; two sequences of P/2
tokens each look both ways, as a conditional and an unconditional row do. Its weights are quantized to the nearest INT4
with integer scales and given a random low-rank branch: what codes are does not change how long they take. Before an
engine is timed its output is judged: dense back ends by their distance from transformers, quantized ones by their
distance from w16, which is the same codes and low-rank branches with activations that are not quantized. The reference
in plain torch has such a distance too, the price of quantizing activations, and an engine may have little more. It
cannot be compared with the reference itself: the last bit of a sum decides now and then into which code a value is
rounded, and through 28 layers such differences grow as large as the price.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from omniw4.bench.omnivoice import with_random_quantized
from omniw4.bench.result import BackboneRow, OnProgress, Progress
from omniw4.bench.timing import REPETITIONS, WARMUP, Timing, measure, measure_eager
from omniw4.errors import UsageError
from omniw4.ops.checks import HALVES
from omniw4.runtime import qwen3_weights
from omniw4.runtime.engine import BUCKETS, Qwen3Engine
from omniw4.runtime.qwen3 import LayerWeights
from omniw4.tensors import LinearSpec, QuantizedLinear

SIZES: dict[str, int] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 8,  # embeddings are not part of a step
    "max_position_embeddings": 4096,
}
HF_EAGER, HF_GRAPH, HF_COMPILED = "hf-eager", "hf-graph", "hf-compiled"
BASELINES = (HF_EAGER, HF_GRAPH, HF_COMPILED)
ENGINES = ("fp16", "bf16", "fp8", "w4a4", "w4a8")
ALL = (*BASELINES, *ENGINES)
TOKENS = (128, 256, 384, 704, 1024, 2048)
SEQUENCES = 2
CALLS = 8  # steps a sample: the host runs ahead of the GPU, as it does in a decoding loop
# Relative error of the last hidden state that an engine may have. Dense: rounding through 28 layers. FP8: its grid.
TOLERANCES = {"fp16": 0.02, "bf16": 0.15, "fp8": 0.25}
EXCESS = 1.1  # times the reference's distance from w16 that a quantized engine may have


def bench_backbone(
    device: torch.device,
    dtype: torch.dtype,
    *,
    engines: Sequence[str] = ALL,
    tokens: Sequence[int] = TOKENS,
    sizes: dict[str, int] | None = None,
    layout: str | None = None,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
    on_progress: OnProgress | None = None,
) -> list[BackboneRow]:
    """Rows in the order of ``tokens`` within that of ``engines``; speedups are over every other engine of the run.

    Args:
        dtype: of the baselines; float16 or bfloat16, on a CPU float32 too.
        engines: any of :data:`ALL`.
        tokens: P, even.
        sizes: in place of the real backbone's.

    Raises:
        UsageError: an unknown engine, or an odd or non-positive number of tokens.
    """
    if unknown := [name for name in engines if name not in ALL]:
        raise UsageError(f"no engine {unknown[0]!r}", hint=f"--engines takes {', '.join(ALL)}")
    if odd := [count for count in tokens if count < SEQUENCES or count % SEQUENCES]:
        raise UsageError(
            f"{odd[0]} tokens do not make {SEQUENCES} sequences of equal length", hint="take an even number"
        )
    model = random_backbone(sizes or SIZES, device, dtype)
    rows: list[BackboneRow] = []
    wanted = {count: _hf_call(model, count)() for count in tokens}
    for name in engines:
        for row in _rows(name, model, wanted, device, dtype, layout, warmup, repetitions):
            rows.append(row)
            if on_progress is not None:
                on_progress(Progress("backbone", len(rows), len(engines) * len(tokens), f"{name} at P={row.tokens}"))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _with_speedups(rows)


def parse_tokens(text: str) -> list[int]:
    """``"128,704"`` to ``[128, 704]``; raises UsageError otherwise."""
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if not part.isdecimal()]:
        raise UsageError(f"--tokens wants numbers of tokens, found {bad[0]!r}", hint="such as `--tokens 128,704`")
    return [int(part) for part in parts]


def random_backbone(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A ``Qwen3Model`` with random weights, made on the device."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(**sizes)
    config._attn_implementation = "sdpa"
    with device:
        model = Qwen3Model(config).to(dtype)
    return model.eval().requires_grad_(False)


def _rows(
    name: str,
    model: nn.Module,
    wanted: dict[int, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    layout: str | None,
    warmup: int,
    repetitions: int,
) -> Iterator[BackboneRow]:
    if name in BASELINES:
        for count in wanted:
            yield _baseline(name, model, count, device, dtype, warmup, repetitions)
        return
    source = model
    own = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": dtype if dtype in HALVES else torch.bfloat16}
    if name.startswith("w4"):
        source = with_random_quantized(model, LinearSpec(scale_type="integer"))
    elif own[name] != dtype:
        source = random_backbone({key: getattr(model.config, key) for key in SIZES}, device, own[name])
    targets, limits = wanted, dict.fromkeys(wanted, TOLERANCES.get(name, 0.0))
    if name.startswith("w4"):
        targets = _plain(source, wanted, 16)
        reference = _plain(source, wanted, 8 if name == "w4a8" else 4)
        limits = {count: EXCESS * _error(reference[count], targets[count]) for count in wanted}
    buckets = sorted({next((size for size in BUCKETS if size >= count), count) for count in wanted})
    started = time.perf_counter()
    engine = Qwen3Engine.from_model(
        source, backend=name, buckets=buckets, layout=layout if name.startswith("w4") else None, max_sequences=SEQUENCES
    )
    memory = engine.memory()
    seconds = time.perf_counter() - started
    for count in wanted:
        inputs = packed_inputs(count, engine.config.hidden_size, device, engine.dtype)
        error = _error(engine(*inputs), targets[count])
        checked = error <= limits[count]  # not when it is NaN
        timing = None
        if checked:
            timing = _time(lambda inputs=inputs: engine(*inputs), device, warmup, repetitions)  # type: ignore[misc]
        bucket = next(size for size in buckets if size >= count)
        yield BackboneRow(
            name, count, bucket, _name(engine.dtype), checked, error if math.isfinite(error) else None, timing,
            limit=limits[count], weight_bytes=memory.weights, total_bytes=memory.total, start_up_seconds=seconds,
            attention=engine.attention,
            note="" if checked else f"not timed: error {error:.3g} is above {limits[count]:.3g}",
        )  # fmt: skip


def packed_inputs(
    count: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden ``[P, H]``, positions ``[P]``, cu_seqlens ``[3]``: what :func:`_hf_call` gives transformers."""
    length = count // SEQUENCES
    hidden = torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(device, dtype)
    positions = torch.arange(length, device=device).repeat(SEQUENCES)
    return hidden, positions, torch.arange(SEQUENCES + 1, dtype=torch.int32, device=device) * length


def _hf_call(model: nn.Module, count: int) -> Callable[[], torch.Tensor]:
    """transformers' forward as OmniVoice calls it: embeddings and a 4-D boolean mask, no cache."""
    length, width = count // SEQUENCES, int(model.config.hidden_size)  # type: ignore[arg-type, union-attr]
    parameter = next(model.parameters())
    hidden = packed_inputs(count, width, parameter.device, parameter.dtype)[0].reshape(SEQUENCES, length, width)
    mask = torch.ones(SEQUENCES, 1, length, length, dtype=torch.bool, device=parameter.device)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = model(inputs_embeds=hidden, attention_mask=mask, use_cache=False).last_hidden_state
        return out

    return call


def _baseline(
    name: str,
    model: nn.Module,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    warmup: int,
    repetitions: int,
) -> BackboneRow:
    target, seconds, note = model, None, ""
    if name == HF_COMPILED:
        torch._dynamo.reset()
        target = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    call = _hf_call(target if name == HF_COMPILED else model, count)
    timing = None
    try:
        started = time.perf_counter()
        call()
        if name == HF_COMPILED:
            seconds = time.perf_counter() - started
        if name == HF_EAGER or device.type != "cuda":
            timing = _time(call, device, warmup, repetitions, calls=1)
        else:
            with torch.inference_mode():
                timing = measure([call], device, warmup=warmup, repetitions=repetitions)
    except RuntimeError as e:  # a compiler that is not there, a forward that waits for the GPU
        note = f"not timed: {' '.join(str(e).split())[:160]}"
    return BackboneRow(name, count, count, _name(dtype), True, None, timing, start_up_seconds=seconds, note=note)


def _plain(source: nn.Module, counts: Iterable[int], act_bits: int) -> dict[int, torch.Tensor]:
    """Hidden states ``[P, H]`` of the quantized model in plain torch, one linear after the other."""

    def altered(layer: LayerWeights) -> LayerWeights:
        parts: dict[str, Any] = {
            name: replace(part, spec=replace(part.spec, act_bits=act_bits))
            for name, part in vars(layer).items()
            if isinstance(part, QuantizedLinear)
        }
        return replace(layer, **parts)

    weights = qwen3_weights.from_model(source)
    weights.layers = [altered(layer) for layer in weights.layers]
    device, dtype = weights.norm.device, weights.norm.dtype
    engine = Qwen3Engine(weights, backend="reference", device=device, dtype=dtype, buckets=())
    width = engine.config.hidden_size
    return {count: engine(*packed_inputs(count, width, device, dtype)) for count in counts}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``‖found − wanted‖ / ‖wanted‖``, whichever of the two shapes tokens have."""
    wanted = wanted.double().reshape(found.shape)
    return float((found.double() - wanted).norm() / wanted.norm())


def _time(call: Callable[[], Any], device: torch.device, warmup: int, repetitions: int, calls: int = CALLS) -> Timing:
    """Calls one behind the other, the host's work in the time where the GPU has to wait for it."""
    if device.type != "cuda":
        return measure([call], device, warmup=warmup, repetitions=repetitions)
    return measure_eager([call] * calls, device, warmup=warmup, repetitions=repetitions)


def _with_speedups(rows: Sequence[BackboneRow]) -> list[BackboneRow]:
    medians = {(row.engine, row.tokens): row.timing.median for row in rows if row.timing}
    done = []
    for row in rows:
        own = medians.get((row.engine, row.tokens))
        over = {
            engine: median / own
            for (engine, count), median in medians.items()
            if own and count == row.tokens and engine != row.engine
        }
        done.append(replace(row, speedups=over))
    return done


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
