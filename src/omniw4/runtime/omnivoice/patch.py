"""``accelerate`` puts a :class:`Decoder` in place of a model's iterative decoding, ``restore`` takes it out again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError, UsageError
from omniw4.runtime.engine import Qwen3Engine
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.omnivoice import silence
from omniw4.runtime.omnivoice.decoder import BUCKETS, MAX_REQUESTS, MAX_STEPS, Decoder, OnProgress, Prompt
from omniw4.runtime.omnivoice.step import Parts, Sampling, sampling_of

_NEEDED = {
    "methods": ("_generate_iterative", "_prepare_inference_inputs", "_prepare_embed_inputs"),
    "attributes": ("llm", "audio_embeddings", "audio_heads", "codebook_layer_offsets"),
}
_ELSEWHERE = {  # settings that are spent before decoding begins, or after it
    "denoise", "preprocess_prompt", "postprocess_output", "audio_chunk_duration", "audio_chunk_threshold",
    "pad_duration", "fade_duration",
}  # fmt: skip
_MARK = "_omniw4_accelerated"


@dataclass(frozen=True)
class Accelerated:
    """What :func:`accelerate` did; ``report`` is a plain dict of it."""

    engine: Qwen3Engine
    decoder: Decoder
    device: torch.device  # of the model
    dtype: torch.dtype
    released: bool = False  # the model's own linears are gone

    def report(self) -> dict[str, Any]:
        """Back end, attention, bytes of weights, and what each captured graph took."""
        engine = self.engine
        return {
            "backend": engine.backend,
            "attention": engine.attention,
            "memory": asdict(engine.memory()),
            "start_up": asdict(self.decoder.start_up),
        }


def accelerate(
    model: nn.Module,
    checkpoint: str | Path | Checkpoint | None = None,
    *,
    backend: str | None = None,
    buckets: Sequence[int] = BUCKETS,
    max_requests: int = MAX_REQUESTS,
    max_steps: int = MAX_STEPS,
    release: bool = False,
    on_progress: OnProgress | None = None,
) -> Accelerated:
    """Make ``model.generate`` decode through the fused engine, in place.

    ``generate`` keeps its arguments and its results: with greedy settings the codes are those of the unpatched model,
    up to ties within rounding; with noise they have its distribution, and ``torch.manual_seed`` makes them repeat.
    What the engine cannot do the package does, with a warning that says why. Silences are found faster on the way in
    and out, with the same samples as a result (:mod:`omniw4.runtime.omnivoice.silence`).

    Args:
        model: an OmniVoice of the package omnivoice, 0.2 or newer, on its device and in its dtype.
        checkpoint: a folder of ``omniw4 quantize`` whose linears take the place of the model's.
        backend: "fp16", "bf16", "fp8", "w4a4", "w4a8" or "reference" (plain torch, runs anywhere); None for w4a4 with
            a checkpoint or a quantized model, the model's own 16-bit type without one, the reference on a CPU.
        buckets: packed tokens (conditional and unconditional rows together) to capture CUDA graphs for.
        max_requests: requests of a batch that a graph can hold.
        max_steps: ``num_step`` up to which graphs serve.
        release: give back the memory of the model's own linears, which :func:`restore` and calls that the engine
            cannot do then lack.
        on_progress: called with (done, total, what) while graphs are captured.

    Raises:
        ModelError: the model is no OmniVoice, or its backbone no Qwen3, or the checkpoint is of another model.
        UsageError: an unknown back end, or one that does not run on the model's device.
    """
    _require_omnivoice(model)
    restore(model)
    width: nn.Embedding = model.audio_embeddings  # type: ignore[assignment]
    template = width.weight.new_zeros(1, width.embedding_dim).detach()
    engine = Qwen3Engine.from_model(
        model,
        checkpoint,
        backend=backend or _default_backend(template, quantized=checkpoint is not None or _is_quantized(model)),
        causal=False,
        buckets=(),
        release=release,
    )
    decoder = Decoder(
        _parts(model, engine),
        model._prepare_embed_inputs,  # type: ignore[arg-type]
        template,
        buckets=buckets,
        max_requests=max_requests,
        max_steps=max_steps,
        on_progress=on_progress,
    )
    accelerated = Accelerated(engine, decoder, template.device, template.dtype, release)
    original: Callable[..., Any] = model._generate_iterative  # type: ignore[assignment]
    model.__dict__["_generate_iterative"] = partial(_generate_iterative, model, accelerated, original, set())
    model.__dict__[_MARK] = accelerated
    silence.use_quick(model)
    return accelerated


def restore(model: nn.Module) -> bool:
    """Undo :func:`accelerate`; the engine's memory is free once nothing else refers to it. False: nothing to undo."""
    if _MARK not in model.__dict__:
        return False
    del model.__dict__["_generate_iterative"], model.__dict__[_MARK]
    silence.use_original(model)
    return True


def _generate_iterative(
    model: Any, accelerated: Accelerated, original: Callable[..., Any], warned: set[str], task: Any, gen_config: Any
) -> list[torch.Tensor]:
    """In place of the method of that name: the codes ``[C, t]`` of every item of the task."""
    reason = _why_not(model, accelerated, gen_config)
    if reason and accelerated.released:
        raise UsageError(f"this call is for the package omnivoice: {reason}", hint="accelerate(release=False)")
    if reason:
        if reason not in warned:
            warned.add(reason)
            warnings.warn(f"omniw4 leaves this call to the package omnivoice: {reason}", stacklevel=2)
        result: list[torch.Tensor] = original(task, gen_config)
        return result
    prompts = []
    for i in range(task.batch_size):
        inputs = model._prepare_inference_inputs(
            task.texts[i],
            task.target_lens[i],
            task.ref_texts[i],
            task.ref_audio_tokens[i],
            task.langs[i],
            task.instructs[i],
            gen_config.denoise,
        )
        prompts.append(Prompt(inputs["input_ids"][0], inputs["audio_mask"][0], task.target_lens[i]))
    return accelerated.decoder.decode(prompts, sampling_of(gen_config))


def _why_not(model: Any, accelerated: Accelerated, gen_config: Any) -> str:
    """Why a call cannot go through the engine; empty when it can."""
    parameter = model.audio_embeddings.weight
    if parameter.device != accelerated.device:
        return f"the model has moved to {parameter.device} since accelerate()"
    if parameter.dtype != accelerated.dtype:
        return f"the model has become {parameter.dtype} since accelerate()"
    known = _ELSEWHERE | {field.name for field in fields(Sampling)}
    strange = [
        field.name
        for field in fields(gen_config)
        if field.name not in known and getattr(gen_config, field.name) != field.default
    ]
    if strange:
        return f"it does not know the setting {strange[0]}"
    return ""


def _parts(model: Any, engine: Qwen3Engine) -> Parts:
    def backbone(hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return engine.forward(hidden.to(engine.dtype), positions, cu_seqlens, len(hidden)).to(hidden.dtype)

    return Parts(
        model.audio_embeddings, model.codebook_layer_offsets, backbone, model.audio_heads, model.config.audio_mask_id
    )


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, W4A4Linear) for module in model.modules())


def _default_backend(template: torch.Tensor, *, quantized: bool) -> str:
    if not template.is_cuda:
        return "reference"
    if quantized:
        return "w4a4"
    return "bf16" if template.dtype == torch.bfloat16 else "fp16"


def _require_omnivoice(model: nn.Module) -> None:
    missing = [name for names in _NEEDED.values() for name in names if not hasattr(model, name)]
    if missing:
        raise ModelError(
            f"a {type(model).__name__} has no {missing[0]}, an OmniVoice of the package omnivoice is wanted",
            hint="accelerate takes what OmniVoice.from_pretrained returns",
        )
