"""Text by the model itself: sequences sampled from its own distribution, to calibrate and distil on without any data.

A sequence begins with BOS (or another token) alone, and goes on to its full length, whatever the model emits. Token
``t`` is drawn as ``argmax_v(logits_v - temperature · log E_v)`` with ``E_v`` exponentially distributed, which is a draw
from ``softmax(logits / temperature)`` (the Gumbel-max trick). Each sequence has random numbers of its own, so that its
text does not depend on what is sampled beside it; and a logit that is rounded otherwise in a batch of another size
changes the token only where two of them were equal but for that rounding, however many tokens the vocabulary has.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omniw4.calibrate.dataset import MIN_TOKENS
from omniw4.errors import DatasetError, ModelError, NonFiniteError, UsageError
from omniw4.model import LoadedModel, check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 32
_MOST_TOKENS = 1 << 32  # half a terabyte of rows; what is written is held in memory
_REPORTS = 100  # how often progress is told, and NaN looked for: a look waits for the GPU

OnTokens = Callable[[int, int, str], None]


@dataclass(frozen=True)
class OwnText:
    """What a model wrote.

    Attributes:
        texts: in the order of the samples, without the empty ones.
        empty: samples that hold no text and were left out.
        tokens: sampled, of all samples, the one each began with not counted.
        begin, begin_token: number of the token that each began with, and how the vocabulary writes it.
    """

    texts: list[str]
    empty: int
    tokens: int
    begin: int
    begin_token: str


def write_text(
    loaded: LoadedModel,
    samples: int,
    seq_len: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = BATCH,
    begin: str | None = None,
    on_tokens: OnTokens | None = None,
) -> OwnText:
    """Let a causal language model write ``samples`` texts, and decode them without special tokens.

    Args:
        loaded: in eval mode, with its tokenizer.
        begin: the token that a text begins after, as :func:`begin_token` takes it.
        seq_len, temperature, seed, batch_size, on_tokens: of :func:`sample_tokens`.

    Raises:
        ModelError: no causal language model, or none with a key/value cache; no tokenizer, none with that token, or one
            of another model.
        UsageError, NonFiniteError: as :func:`sample_tokens`.
        DatasetError: all texts are empty.
    """
    check_causal(loaded.model, loaded.source)
    first = begin_token(loaded.tokenizer, loaded.source, begin)
    tokens = sample_tokens(
        loaded.model,
        first,
        samples,
        seq_len,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        on_tokens=on_tokens,
    )
    tokenizer: Any = loaded.tokenizer
    decoded = [
        tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row in tokens[:, 1:].tolist()
    ]
    texts = [text for text in decoded if text.strip()]
    if not texts:
        raise DatasetError(
            f"all {samples} texts that model {loaded.source!r} wrote are empty",
            hint="raise --seq-len; a model that was not trained on text writes none",
        )
    written = str(tokenizer.convert_ids_to_tokens(first))
    return OwnText(texts, samples - len(texts), samples * (seq_len - 1), first, written)


@torch.inference_mode()
def sample_tokens(
    model: nn.Module,
    begin: int,
    samples: int,
    seq_len: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = BATCH,
    on_tokens: OnTokens | None = None,
) -> torch.Tensor:
    """Sequences from the model's own distribution.

    Memory beside the model: the keys and values of ``batch_size`` sequences, and some FP64 rows of the vocabulary.

    Args:
        model: a causal language model of transformers in eval mode, with logits ``[B, L, V]`` and a cache.
        begin: the token that each sequence begins with.
        seq_len: tokens a sequence L, ``begin`` included.
        temperature: what the logits are divided by; above 0.
        seed: of all sequences; sequence i has the same random numbers however many there are.
        batch_size: sequences a forward; changes speed and memory, and the tokens only where rounding does.
        on_tokens: called some hundred times with (tokens sampled, tokens in all, where it is).

    Returns:
        ``[samples, L]`` int64 on the CPU.

    Raises:
        UsageError: a count or temperature out of range, or more tokens than the model has positions.
        ModelError: ``begin`` is outside the vocabulary, or the model hands on no cache.
        NonFiniteError: logits that hold NaN or +inf.
    """
    _check_counts(samples, seq_len, batch_size, temperature)
    check_positions(model, seq_len)
    device = next(model.parameters()).device
    _check_vocabulary(model, begin)
    name = _cache_name(model)
    total, done, steps = samples * (seq_len - 1), 0, 0
    every = max(1, math.ceil(samples / batch_size) * (seq_len - 1) // _REPORTS)
    tokens = torch.full((samples, seq_len), begin, dtype=torch.int64)
    for start in range(0, samples, batch_size):
        stop = min(start + batch_size, samples)
        generators = [torch.Generator(device).manual_seed(_seed_of(seed, i)) for i in range(start, stop)]
        rows = tokens[start:stop].to(device)
        finite = torch.ones(stop - start, dtype=torch.bool, device=device)
        cache: Any = None
        noise: torch.Tensor | None = None  # [B, V]
        for position in range(1, seq_len):
            # one token goes in, so that there is one row of logits a sequence, whatever logits_to_keep is
            output = model(input_ids=rows[:, position - 1 : position], use_cache=True, **{name: cache})
            cache = getattr(output, name, None)
            if cache is None:
                raise _no_cache(model)
            logits = output.logits[:, -1].double()  # [B, V]
            finite &= torch.isfinite(logits.amax(dim=-1))  # -inf alone is a token that is never taken
            noise = torch.empty_like(logits) if noise is None else noise
            for row, generator in zip(noise, generators, strict=True):
                row.exponential_(generator=generator)
            rows[:, position] = logits.sub_(noise.log_(), alpha=temperature).argmax(dim=-1)
            steps, done = steps + 1, done + stop - start
            if steps % every == 0 or position == seq_len - 1:
                _check_finite(finite, model)
                if on_tokens is not None:
                    on_tokens(done, total, f"token {position + 1} of sequences {start + 1} to {stop}")
        tokens[start:stop] = rows.cpu()
    return tokens


def check_causal(model: nn.Module, name: str) -> None:
    """Refuse what cannot write: no language head, or one that does not predict the next token from those before it.

    Args:
        model: may be a skeleton.
        name: what to call it in the message.

    Raises:
        ModelError: a bare backbone, an OmniVoice, a masked or an encoder-decoder model.
    """
    config = getattr(model, "config", None)
    can: Any = getattr(model, "can_generate", None)
    if can is None or not can() or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model {name!r} is a {type(model).__name__}, which writes no text from left to right",
            hint="give a causal language model; an OmniVoice is calibrated with --prompts, others on a --dataset",
        )


def begin_token(tokenizer: PreTrainedTokenizerBase | None, name: str, token: str | None = None) -> int:
    """The token that a text begins after: ``token``, or else the tokenizer's BOS, or without one its EOS.

    Raises:
        ModelError: no tokenizer, or one without that token.
    """
    if tokenizer is None:
        raise ModelError(
            f"model {name!r} has no tokenizer, so its tokens are no text",
            hint="copy its tokenizer files into the model folder",
        )
    if token is not None:
        number = tokenizer.get_vocab().get(token)
        if number is None:
            raise ModelError(
                f"the tokenizer of model {name!r} has no token {token!r} for a text to begin with",
                hint="give one as it is written in the vocabulary, such as '<|endoftext|>'",
            )
        return int(number)
    for special in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if special is not None:
            return int(special)
    raise ModelError(
        f"the tokenizer of model {name!r} has neither a BOS nor an EOS token for a text to begin with",
        hint="name one in its tokenizer_config.json",
    )


def _check_counts(samples: int, seq_len: int, batch_size: int, temperature: float) -> None:
    counts = {"samples": (samples, 1), "seq_len": (seq_len, MIN_TOKENS), "batch_size": (batch_size, 1)}
    for what, (found, least) in counts.items():
        if found < least:
            raise UsageError(f"{what} is {found}, wanted at least {least}")
    if samples * seq_len > _MOST_TOKENS:
        raise UsageError(
            f"{samples} texts of {seq_len} tokens are more than the {_MOST_TOKENS} tokens that a text can have",
            hint="calibration takes some ten thousand; lower --samples",
        )
    if not 0 < temperature < math.inf:
        raise UsageError(
            f"the temperature is {temperature}, wanted a finite number above 0",
            hint="1 is the model's own distribution",
        )


def _check_vocabulary(model: nn.Module, begin: int) -> None:
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    size = embeddings.weight.shape[0]
    if begin >= size:
        raise ModelError(
            f"token {begin} of the tokenizer is outside the model's vocabulary of {size}",
            hint="the tokenizer is of another model: copy that of this one into the model folder",
        )


def _cache_name(model: nn.Module) -> str:
    """What keys and values are called, among arguments and in the output; transformers renamed them."""
    known = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in known), None)
    if name is None:
        raise _no_cache(model)
    return name


def _no_cache(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} hands on no keys and values from one token to the next",
        hint="give a model that does, or calibrate on a text with --dataset",
    )


def _check_finite(finite: torch.Tensor, model: nn.Module) -> None:
    if not bool(finite.all()):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"{type(model).__name__} in {dtype} gives NaN or inf for the next token",
            hint="add --dtype float32 or bfloat16; where that does not help, repair the model's weights",
        )


def _seed_of(seed: int, index: int) -> int:
    """Of sequence ``index``: no two of any seeds are neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big") >> 1
