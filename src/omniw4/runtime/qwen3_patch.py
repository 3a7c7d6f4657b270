"""Any Qwen3 of transformers on the engine::

    from omniw4.runtime import accelerate
    accelerate(model, backend="fp16")     # or accelerate(model, "checkpoint/", backend="w4a4")
    logits = model(input_ids, use_cache=False).logits

The backbone's ``forward`` is replaced in place, ``restore(model)`` puts it back. What it replaces is a whole forward
without a key/value cache: scoring, embedding, prefill, iterative decoding.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.errors import ModelError
from omniw4.runtime import qwen3_weights
from omniw4.runtime.engine import Qwen3Engine

_MARK = "_omniw4_engine"
_NO_CACHE = "call it with use_cache=False, or `restore(model)` to generate with a cache"


def accelerate(
    model: nn.Module,
    checkpoint: str | Path | None = None,
    *,
    backend: str = "fp16",
    causal: bool = True,
    **options: Any,
) -> Qwen3Engine:
    """Replace the forward of a Qwen3's backbone by the engine's.

    Args:
        model: a Qwen3Model, or a model with one as ``model``, in eval mode.
        checkpoint: a folder of ``omniw4 quantize``, whose linears take the place of the model's.
        backend: see :meth:`Qwen3Engine.from_model`, also for ``options``.
        causal: as transformers' Qwen3 attends; False for a model that was trained to look both ways.

    Returns:
        The engine, for its reports.

    Raises:
        ModelError, UsageError, CheckpointError: as :meth:`Qwen3Engine.from_model`.
    """
    if hasattr(model, "_generate_iterative"):  # would be attended to causally, and decode nonsense
        raise ModelError(
            f"{type(model).__name__} decodes by itself and attends both ways",
            hint="accelerate an OmniVoice with omniw4.runtime.omnivoice.accelerate",
        )
    restore(model)
    engine = Qwen3Engine.from_model(model, checkpoint, backend=backend, causal=causal, **options)
    _, backbone = qwen3_weights.find_backbone(model)
    backbone.__dict__["forward"] = partial(_forward, backbone, engine)
    backbone.__dict__[_MARK] = engine
    return engine


def restore(model: nn.Module) -> bool:
    """Undo :func:`accelerate`. False: there was nothing to undo."""
    _, backbone = qwen3_weights.find_backbone(model)
    if _MARK not in backbone.__dict__:
        return False
    del backbone.__dict__["forward"], backbone.__dict__[_MARK]
    return True


def _forward(
    backbone: nn.Module,
    engine: Qwen3Engine,
    input_ids: torch.Tensor | None = None,  # [B, S]
    attention_mask: torch.Tensor | None = None,  # [B, S], 1 for tokens and 0 for padding
    position_ids: torch.Tensor | None = None,  # [B, S] or [1, S]
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,  # [B, S, H]
    use_cache: bool | None = None,
    **others: Any,
) -> Any:
    """In place of ``Qwen3Model.forward``; rows of padding are zero."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    _refuse(past_key_values, use_cache, others)
    if (input_ids is None) == (inputs_embeds is None):
        raise ModelError("the accelerated forward takes either input_ids or inputs_embeds")
    if inputs_embeds is None:
        inputs_embeds = backbone.embed_tokens(input_ids)  # type: ignore[operator]
    hidden = inputs_embeds.detach()
    batch, length, width = hidden.shape
    kept = _kept(attention_mask, batch, length, hidden.device)
    if position_ids is None:
        position_ids = torch.arange(length, device=hidden.device)[None]
    positions = position_ids.expand(batch, length)[kept]
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=hidden.device)
    cu_seqlens[1:] = kept.sum(1).cumsum(0)
    packed = engine(hidden[kept].to(engine.dtype), positions, cu_seqlens)
    out = hidden.new_zeros(batch, length, width)
    out[kept] = packed.to(hidden.dtype)
    return BaseModelOutputWithPast(last_hidden_state=out, past_key_values=None)


def _kept(mask: torch.Tensor | None, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """``[B, S]`` bool, True where there is a token."""
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    if tuple(mask.shape) != (batch, length):
        raise ModelError(
            f"the accelerated forward takes an attention mask of shape {[batch, length]}, found {list(mask.shape)}",
            hint="build the engine itself for other masks: Qwen3Engine.from_model(model, causal=...)",
        )
    return mask.to(device).bool()


def _refuse(past_key_values: Any, use_cache: bool | None, others: dict[str, Any]) -> None:
    """What the engine does not do must not be passed over in silence."""
    if past_key_values is None:
        past_key_values = others.get("cache")
    if past_key_values is not None or use_cache:
        raise ModelError("the accelerated forward has no key/value cache", hint=_NO_CACHE)
    for name in ("output_hidden_states", "output_attentions"):
        if others.get(name):
            raise ModelError(f"the accelerated forward does not give {name.removeprefix('output_')}")
