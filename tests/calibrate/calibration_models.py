"""Tiny models and tokenizers for calibration, and naive statistics to compare with."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from omniw4.calibrate.dataset import TokenSet
from omniw4.model import find_backbone, find_linears
from omniw4.tensors import LinearStats
from tiny_models import llama, qwen3


class OmniVoiceLike(nn.Module):
    """A wrapper that keeps its backbone under ``llm`` and feeds it embeddings."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        self.llm = qwen3(attn_implementation=attention).model
        self.heads = nn.ModuleList(nn.Linear(128, 16) for _ in range(2))


MODELS = {"qwen3": qwen3, "llama-bias": lambda: llama(attention_bias=True, mlp_bias=True), "llm": OmniVoiceLike}


def make_tokenizer(*, bos: bool = False, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte; ``<s>`` is 0 when there is a BOS."""
    vocabulary = {"<s>": 0, **{c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>" if bos or adds_bos else None)


def token_set(lengths: list[int], seq_len: int = 24, pad: int = 0, seed: int = 0) -> TokenSet:
    """Random tokens; row i has ``lengths[i]`` real ones, then padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 300, (len(lengths), seq_len), generator=generator)
    mask = torch.arange(seq_len)[None] < torch.tensor(lengths)[:, None]
    return TokenSet(tokens.masked_fill(~mask, pad), mask, {"dataset": "random", "tokens": sum(lengths)})


@torch.no_grad()
def naive_statistics(model: nn.Module, batches: list[tuple[dict[str, Any], torch.Tensor]]) -> dict[str, LinearStats]:
    """Statistics of every linear of the backbone from plain forwards, in FP64, one row after another.

    Args:
        batches: keyword arguments of the backbone, and the mask ``[B, L]`` of rows to count.
    """
    prefix, backbone = find_backbone(model)
    rows: dict[str, list[torch.Tensor]] = {}
    current: list[torch.Tensor] = []

    def record(path: str) -> Any:
        return lambda _, args: rows.setdefault(path, []).append(args[0][current[0]].double())

    handles = [
        linear.register_forward_pre_hook(record(f"{prefix}.{name}")) for name, linear in find_linears(backbone).items()
    ]
    for inputs, mask in batches:
        current[:] = [mask]
        backbone(**inputs)
    for handle in handles:
        handle.remove()
    return {path: _naive(torch.cat(x)) for path, x in rows.items()}


def _naive(x: torch.Tensor) -> LinearStats:
    plain, twin = (torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64) for _ in range(2))
    for row in x:
        plain += torch.outer(row, row) / len(x)
        twin += torch.outer(row, row) / row.square().mean() / len(x)
    return LinearStats(plain, twin, x.abs().amax(0), x.square().mean(0).sqrt(), len(x))


def assert_same(found: LinearStats, wanted: LinearStats, path: str, tolerance: float = 1e-5) -> None:
    """Counts equal, tensors within ``tolerance`` of their norm."""
    assert (found.tokens, found.excluded) == (wanted.tokens, wanted.excluded), path
    for name in ("hessian", "hessian_normalized", "absmax", "rms"):
        a, b = getattr(found, name).double(), getattr(wanted, name).double()
        error = float((a - b).norm() / b.norm())
        assert error <= tolerance, f"{name} of {path}: relative difference {error:.1e}"
