"""Tiny random Qwen3 backbones, packed inputs, and the Hugging Face forward they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tiny_models import qwen3

HIDDEN = 128


def backbone(**changes: Any) -> nn.Module:
    """A Qwen3ForCausalLM whose attention is plain, so that any 4-D mask works."""
    return qwen3(**{"attn_implementation": "eager", **changes})


def packed(lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """hidden ``[P, H]``, positions ``[P]``, cu_seqlens ``[B + 1]`` of sequences of these lengths."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths), HIDDEN, generator=g).to(dtype)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return hidden, positions, torch.tensor(ends, dtype=torch.int32)


def padded_forward(model: nn.Module, hidden: torch.Tensor, lengths: Sequence[int], *, causal: bool) -> torch.Tensor:
    """``Qwen3Model`` on a right-padded batch with a 4-D mask; the rows of tokens, packed again."""
    longest = max(lengths)
    batch = torch.zeros(len(lengths), longest, hidden.shape[1], dtype=hidden.dtype)
    inside = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, rows in enumerate(hidden.split(list(lengths))):
        batch[row, : len(rows)] = rows
        inside[row, : len(rows)] = True
    allowed = inside[:, None, None, :].expand(-1, 1, longest, longest)
    if causal:
        allowed = allowed & torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, torch.finfo(hidden.dtype).min)
    with torch.no_grad():
        out = model.model(inputs_embeds=batch, attention_mask=mask, use_cache=False).last_hidden_state  # type: ignore
    return out[inside]
