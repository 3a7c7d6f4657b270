"""accelerate(model): transformers' own calls through the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import backbone

from omniw4.errors import ModelError
from omniw4.runtime import accelerate, restore
from problems import assert_same, relative_error

IDS = torch.arange(24).reshape(2, 12) * 7 % 300


def logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**{"input_ids": IDS, "use_cache": False, **inputs}).logits
    return result


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_padded_batches(side: str) -> None:
    model = backbone()
    inputs: dict[str, Any] = {}
    if side != "none":
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[0, slice(9, None) if side == "right" else slice(0, 3)] = 0
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    wanted = logits(model, **inputs)
    engine = accelerate(model, backend="reference", buckets=())
    found = logits(model, **inputs)
    tokens = inputs.get("attention_mask", torch.ones(2, 12)).bool()
    assert relative_error(found[tokens], wanted[tokens]) < 1e-5
    assert engine.causal
    assert restore(model)
    assert_same(logits(model, **inputs), wanted, "restored")
    assert not restore(model)


def test_embeddings_and_the_bare_backbone() -> None:
    model = backbone()
    embeds = model.model.embed_tokens(IDS).detach()  # type: ignore[operator, union-attr]
    with torch.no_grad():
        wanted = model.model(inputs_embeds=embeds, use_cache=False).last_hidden_state  # type: ignore[operator]
        accelerate(model.model, backend="reference", buckets=(32,))  # type: ignore[arg-type]
        found = model.model(inputs_embeds=embeds).last_hidden_state  # type: ignore[operator]
    assert relative_error(found, wanted) < 1e-5


def test_looking_both_ways() -> None:
    model = backbone()
    one_way = logits(model)
    accelerate(model, backend="reference", buckets=(), causal=False)
    assert relative_error(logits(model), one_way) > 0.1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"use_cache": True}, "no key/value cache"),
        ({"past_key_values": object()}, "no key/value cache"),
        ({"output_hidden_states": True}, "does not give hidden_states"),
        ({"output_attentions": True}, "does not give attentions"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, r"attention mask of shape \[2, 12\], found \[2, 1, 12, 12\]"),
        ({"inputs_embeds": torch.zeros(2, 12, 128)}, "either input_ids or inputs_embeds"),
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
    ],
)
def test_refused_by_name(inputs: dict[str, Any], message: str) -> None:
    model = backbone(num_hidden_layers=1)
    accelerate(model, backend="reference", buckets=())
    with pytest.raises(ModelError, match=message):
        model.model(**{"input_ids": IDS, **inputs})  # type: ignore[operator]
