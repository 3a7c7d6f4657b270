"""The engines a profile compares: a name, and a callable that does one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.errors import ModelError, UsageError
from omniw4.model import find_backbone

HF, SWAPPED, PACKAGE = "hf", "swapped", "package"
BACKENDS = ("reference", "fp16", "bf16", "fp8", "w4a4", "w4a8")
REFERENCE_SECONDS = 4.0


@dataclass(frozen=True)
class Engine:
    """``step()`` does the same work at every call; ``note`` is what must be said beside its numbers."""

    name: str
    step: Callable[[], Any]
    note: str = ""


def backbone(
    names: Sequence[str],
    original: nn.Module | None,
    quantized: Callable[[], nn.Module] | None = None,
    *,
    tokens: int,
    sequences: int = 1,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> list[Engine]:
    """One forward of the backbone on random embeddings, ``tokens`` in all, in equal sequences.

    Args:
        names: "hf" (transformers, as it is), "swapped" (transformers with W4A4Linear in place of its linears), or a
            back end of :class:`omniw4.runtime.engine.Qwen3Engine`; the INT4 ones run the quantized model.
        original: the unquantized model, for "hf" and the back ends in 16 and 8 bits.
        quantized: gives the model with W4A4Linear; called once, when an engine needs it.

    Raises:
        UsageError: an unknown engine, one named twice, one whose model is missing, or fewer tokens than sequences.
        ModelError: a model that the engine cannot run.
    """
    if tokens < sequences:
        raise UsageError(f"{tokens} tokens are fewer than {sequences} sequences", hint="raise --tokens")
    lazily: dict[str, nn.Module] = {} if original is None else {"original": original}

    def need(kind: str, name: str) -> nn.Module:
        if kind == "quantized" and kind not in lazily and quantized is not None:
            lazily[kind] = quantized()
        if kind not in lazily:
            hint = "name the original model, `omniw4 profile MODEL`" if kind == "original" else "give --checkpoint DIR"
            raise UsageError(f"engine {name!r} needs the {kind} model", hint=hint)
        return lazily[kind]

    _check_distinct(names)
    target = torch.device(device)
    engines = []
    for name in names:
        if name == HF:
            engines.append(Engine(name, _transformers(need("original", name), tokens, sequences, causal, target)))
        elif name == SWAPPED:
            engines.append(Engine(name, _transformers(need("quantized", name), tokens, sequences, causal, target)))
        elif name in BACKENDS:
            kind = "quantized" if name in ("w4a4", "w4a8") or original is None else "original"
            engines.append(_engine(name, need(kind, name), tokens, sequences, causal, target))
        else:
            raise UsageError(f"no engine {name!r}", hint=f"--engine takes {', '.join((HF, SWAPPED, *BACKENDS))}")
    return engines


def omnivoice(
    names: Sequence[str],
    original: Any,
    quantized: Callable[[], Any] | None = None,
    *,
    seconds: float = 4.0,
    num_step: int = 8,
) -> list[Engine]:
    """One ``generate()`` of the real package: text and 4 s of reference audio to a waveform.

    Args:
        names: "package" (unpatched), or a back end for :func:`omniw4.runtime.omnivoice.accelerate`.
        original: an OmniVoice with codec and tokenizer.
        quantized: gives the same with W4A4Linear, for the INT4 back ends.
        seconds: of audio to make. num_step: decoding steps.

    Raises:
        UsageError: an unknown engine, one named twice, or one whose model is missing.
        ModelError: the model cannot generate.
    """
    from omniw4.runtime.omnivoice import accelerate, restore

    _check_distinct(names)
    if getattr(original, "audio_tokenizer", None) is None:
        raise ModelError(
            "the OmniVoice has no codec, so it cannot generate", hint="name a folder with audio_tokenizer/"
        )
    rate = original.sampling_rate
    noise = torch.randn(1, int(REFERENCE_SECONDS * rate), generator=torch.Generator().manual_seed(0)) * 0.1

    def generate(host: Any) -> Any:
        return host.generate(
            text=["The train to the coast leaves from platform seven in twenty minutes."], language=["en"],
            duration=[seconds], ref_audio=[(noise, rate)], ref_text=["This is the voice to read it in."],
            num_step=num_step, postprocess_output=False,
        )  # fmt: skip

    def step(host: Any, backend: str) -> Callable[[], Any]:
        def run() -> Any:
            if backend != PACKAGE and current.get(id(host)) != backend:
                accelerate(host, backend=backend)
            elif backend == PACKAGE and current.get(id(host)) not in (None, PACKAGE):
                restore(host)
            current[id(host)] = backend
            return generate(host)

        return run

    current: dict[int, str] = {}  # one model serves several engines, one after the other
    engines = []
    twin: Any = None
    for name in names:
        if name not in (PACKAGE, *BACKENDS):
            raise UsageError(f"no engine {name!r}", hint=f"--engine takes {', '.join((PACKAGE, *BACKENDS))}")
        host = original
        if name in ("w4a4", "w4a8"):
            if quantized is None:
                raise UsageError(f"engine {name!r} needs the quantized model", hint="give --checkpoint DIR")
            twin = quantized() if twin is None else twin
            host = twin
        engines.append(Engine(name, step(host, name)))
    return engines


def random_backbone(*, tiny: bool, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """OmniVoice's backbone with random weights, or a small one of the same kind."""
    from transformers import Qwen3Config, Qwen3Model

    from omniw4.model.omnivoice import BACKBONE, TINY

    settings = {**(TINY if tiny else BACKBONE), "vocab_size": 64}  # embeddings are given, not looked up
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3Model(Qwen3Config(**settings)).eval()
    finally:
        torch.set_default_dtype(before)


def is_checkpoint(path: str | Path) -> bool:
    return (Path(path) / "omniw4.json").is_file()


def _check_distinct(names: Sequence[str]) -> None:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise UsageError(f"engine {twice[0]!r} is named twice", hint="name each once in --engine")


def _transformers(
    model: nn.Module, tokens: int, sequences: int, causal: bool, device: torch.device
) -> Callable[[], torch.Tensor]:
    """transformers' backbone on a padded batch, with the boolean mask that OmniVoice passes, or none when causal."""
    module = _backbone_of(model)
    parameter = next(p for p in module.parameters() if p.is_floating_point())
    length = -(-tokens // sequences)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sequences, length, int(module.config.hidden_size), generator=generator)  # type: ignore[union-attr, arg-type]
    hidden = hidden.to(device, parameter.dtype)
    mask = None if causal else torch.ones(sequences, 1, length, length, dtype=torch.bool, device=device)
    return lambda: module(inputs_embeds=hidden, attention_mask=mask, use_cache=False)[0]


def _engine(name: str, model: nn.Module, tokens: int, sequences: int, causal: bool, device: torch.device) -> Engine:
    from omniw4.runtime.engine import Qwen3Engine

    engine = Qwen3Engine.from_model(
        model, backend=name, causal=causal, buckets=(tokens,), max_sequences=sequences, device=device
    )
    lengths = [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, engine.config.hidden_size, generator=generator).to(device, engine.dtype)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Engine(name, lambda: engine(hidden, positions, ends), f"{name}: attention through {engine.attention}")


def _backbone_of(model: nn.Module) -> nn.Module:
    """The module whose forward takes ``inputs_embeds``; in a quantized model there is no nn.Linear to find it by."""
    for path in ("llm", "model", ""):
        found = getattr(model, path, None) if path else model
        if isinstance(found, nn.Module) and hasattr(found, "layers"):
            return found
    return find_backbone(model)[1]
