"""Text in, token windows out: what calibration (and held-out evaluation) reads.

The text is laid end to end, cut into windows that do not overlap, and ``samples`` of them are drawn by seed. A text
shorter than one window gives one padded window. What was found is written into a fingerprint.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from omniw4.calibrate.text import BUILTIN, narrowness, read_text
from omniw4.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bos = Literal["model", "always", "never"]
MIN_TOKENS = 8  # a shorter window says nothing about activations
ADVISED_TOKENS = 16384  # some ten tokens for each input feature of a small model
_CHARS_A_TOKEN = 16  # passages are cut this long for each token wanted: four times what English takes

__all__ = ["BUILTIN", "TokenSet", "read_text", "tokenize"]


@dataclass(frozen=True)
class TokenSet:
    """Token windows, the tokens that count, and where they came from."""

    tokens: torch.Tensor  # [S, L] int64
    mask: torch.Tensor  # [S, L] bool; False is padding
    fingerprint: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return self.tokens.shape[0]


def tokenize(
    docs: list[str],
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    seq_len: int,
    seed: int = 0,
    bos: Bos = "model",
    *,
    strict: bool = False,
    name: str = "dataset",
) -> TokenSet:
    """Draw ``samples`` windows of ``seq_len`` tokens.

    Args:
        docs: documents, laid end to end with an empty line between two.
        samples: windows wanted; fewer when the text holds fewer, with a warning.
        seq_len: tokens a window, BOS included.
        seed: which windows, and in which order.
        bos: begin each window with BOS as the tokenizer does by itself (``model``), ``always``, or ``never``.
        strict: raise where there would be a warning.
        name: what to call the text in messages and in the fingerprint.

    Raises:
        DatasetError: no text, fewer than 8 tokens, ``always`` without a BOS token, or a warning under ``strict``.
    """
    text = laid_end_to_end(docs)
    if not text.strip():
        raise DatasetError(f"dataset {name!r} holds no text", hint="give a --dataset that does")
    prefix = _bos_prefix(tokenizer, bos)
    body = seq_len - len(prefix)
    rng = random.Random(seed)
    windows = _windows(_passages(text, samples, body, rng), tokenizer, body)
    if len(windows) < samples:  # tokens longer than _CHARS_A_TOKEN, or the text is short
        windows = _windows([text], tokenizer, body)
    found = sum(map(len, windows))
    if found < MIN_TOKENS:
        raise DatasetError(
            f"dataset {name!r} holds {found} tokens, wanted at least {MIN_TOKENS}", hint="give a longer --dataset"
        )
    rng.shuffle(windows)
    windows = [prefix + window for window in windows[:samples]]
    tokens, mask = _pad(windows, seq_len, tokenizer.pad_token_id or 0)
    counted = int(mask.sum())
    warnings = _shortage(name, samples, len(windows), seq_len, counted) + narrowness(text, name)
    if strict and warnings:
        raise DatasetError(warnings[0], hint="give a longer or broader --dataset, or leave out --strict")
    fingerprint = {
        "dataset": name,
        "text_sha256": text_hash(text),
        "tokens_sha256": tokens_hash(tokens, mask),
        "tokens": counted,
        "samples": len(windows),
        "samples_asked": samples,
        "seq_len": seq_len,
        "seed": seed,
        "bos": {"policy": bos, "token": prefix[0] if prefix else None},
    }
    return TokenSet(tokens, mask, fingerprint, warnings)


def dataset_name(source: str | Path | None) -> str:
    """What a dataset is called in messages and records: never a path of this machine."""
    if source is None:
        return BUILTIN
    return Path(source).name if Path(source).exists() else str(source)


def laid_end_to_end(docs: list[str]) -> str:
    """One text of several documents, with an empty line between two."""
    return "\n\n".join(docs)


def text_hash(text: str) -> str:
    """What identifies a text wherever two uses of one are compared."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tokens_hash(tokens: torch.Tensor, mask: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(tokens.shape)}".encode())
    digest.update(tokens.contiguous().numpy().tobytes())
    digest.update(mask.to(torch.uint8).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _bos_prefix(tokenizer: PreTrainedTokenizerBase, bos: Bos) -> list[int]:
    """``[bos]`` or ``[]``. The tokenizer's own habit is read off what it puts before a word."""
    token = tokenizer.bos_token_id
    if bos == "never":
        return []
    if bos == "always":
        if token is None:
            raise DatasetError("the tokenizer has no BOS token", hint="use --bos model or --bos never")
        return [token]
    habit = tokenizer("a", add_special_tokens=True)["input_ids"]
    return [token] if token is not None and habit and habit[0] == token else []


def _passages(text: str, samples: int, body: int, rng: random.Random) -> list[str]:
    """The whole text, or ``samples`` stretches of it when it is much longer than needed."""
    length = body * _CHARS_A_TOKEN
    starts = range(0, len(text), length)
    if len(starts) <= samples:
        return [text]
    return [text[start : start + length] for start in sorted(rng.sample(starts, samples))]


def _windows(passages: list[str], tokenizer: PreTrainedTokenizerBase, body: int) -> list[list[int]]:
    """Windows of ``body`` tokens that do not overlap; one shorter window when no passage fills one."""
    kwargs = {"add_special_tokens": False, "verbose": False}  # no warning about the model's maximum length
    ids = [tokenizer(passage, **kwargs)["input_ids"] for passage in passages]
    whole = [row[i : i + body] for row in ids for i in range(0, len(row) - body + 1, body)]
    return whole or [max(ids, key=len)]


def _pad(windows: list[list[int]], seq_len: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, windows))  # not seq_len: a text shorter than one window needs no more
    tokens = torch.full((len(windows), min(length, seq_len)), pad, dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = True
    return tokens, mask


def _shortage(name: str, asked: int, found: int, seq_len: int, tokens: int) -> list[str]:
    warnings = []
    if found < asked or tokens < found * seq_len:
        warnings.append(
            f"asked for {asked} samples of {seq_len} tokens, dataset {name!r} gives {found} ({tokens} tokens)"
        )
    elif tokens < ADVISED_TOKENS:
        warnings.append(f"calibration on {tokens} tokens, advised are at least {ADVISED_TOKENS}")
    return warnings
