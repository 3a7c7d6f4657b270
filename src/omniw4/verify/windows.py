"""Held-out windows: which tokens the models are compared on. No randomness; what was chosen is recorded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from omniw4.calibrate.dataset import laid_end_to_end
from omniw4.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_A_TOKEN = 256  # text looked at for each token wanted; bounds the tokenizer's work on a large data set


@dataclass
class Windows:
    """``ids [S, L]`` int64 without padding, and how they came about."""

    ids: torch.Tensor
    record: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def make_windows(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, count: int, seq_len: int, bos_id: int | None
) -> Windows:
    """Non-overlapping windows spread evenly over the text, each beginning with BOS where there is one.

    Args:
        documents: joined by an empty line and tokenized as one text without special tokens.
        count: windows wanted; fewer are made, with a warning, when the text is shorter.
        seq_len: L, BOS included.

    Raises:
        DatasetError: the text does not fill one window.
    """
    text = laid_end_to_end(documents)[: count * seq_len * CHARACTERS_A_TOKEN]
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    own = seq_len - (bos_id is not None)  # tokens of the text in a window
    fitting = min(count, len(tokens) // own)
    if fitting == 0:
        raise DatasetError(
            f"the evaluation text holds {len(tokens)} tokens, wanted at least {own} for one window",
            hint="use shorter windows with `--seq-len`, or a longer text with `--dataset`",
        )
    starts = spread(len(tokens), own, fitting)
    ids = torch.stack([tokens[start : start + own] for start in starts])
    if bos_id is not None:
        ids = torch.cat([torch.full((fitting, 1), bos_id, dtype=torch.int64), ids], dim=1)
    warnings = []
    if fitting < count:
        warnings.append(f"the evaluation text fills {fitting} of the {count} windows asked for ({len(tokens)} tokens)")
    record = {
        "asked": count,
        "count": fitting,
        "seq_len": seq_len,
        "text_tokens": len(tokens),
        "starts": starts,
        "ids_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }
    return Windows(ids, record, warnings)


def spread(total: int, length: int, count: int) -> list[int]:
    """Starts of ``count`` non-overlapping runs of ``length``, from the first element to the last, evenly apart."""
    if count == 1:
        return [0]
    return [i * (total - length) // (count - 1) for i in range(count)]
