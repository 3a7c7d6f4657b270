"""Windows of tokens: how many, which, and what is said about them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from calibration_models import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omniw4.calibrate.dataset import TokenSet, tokenize
from omniw4.errors import DatasetError

TEXT = "".join(f"Sentence number {i} says {i * i % 97}, then {i * 31 % 89}. " for i in range(3000))


def windows(text: str = TEXT, samples: int = 4, seq_len: int = 50, seed: int = 0, **options: object) -> TokenSet:
    tokenizer = options.pop("tokenizer", None) or make_tokenizer()
    return tokenize([text], tokenizer, samples, seq_len, seed, **options)  # type: ignore[arg-type]


def test_windows_are_stretches_of_the_text_that_do_not_overlap() -> None:
    data = windows(samples=40, seq_len=200)
    assert data.tokens.shape == (40, 200)
    assert bool(data.mask.all())
    decoded = make_tokenizer().batch_decode(data.tokens)
    starts = sorted(TEXT.find(window) for window in decoded)
    assert starts[0] >= 0
    assert min(b - a for a, b in pairwise(starts)) >= 200


def test_windows_of_a_long_text_come_from_all_over_it() -> None:
    data = windows(samples=8, seq_len=50)
    starts = [TEXT.find(window) for window in make_tokenizer().batch_decode(data.tokens)]
    assert min(starts) < len(TEXT) / 3
    assert max(starts) > len(TEXT) * 2 / 3


def test_the_seed_decides_and_repeats() -> None:
    assert torch.equal(windows(seed=1).tokens, windows(seed=1).tokens)
    assert not torch.equal(windows(seed=1).tokens, windows(seed=2).tokens)


def test_asking_128_and_getting_30_is_said_and_strict_fails() -> None:
    text = TEXT[: 30 * 50]
    data = windows(text, samples=128)
    assert len(data) == 30
    assert data.fingerprint["samples"] == 30
    assert data.fingerprint["samples_asked"] == 128
    assert any("asked for 128 samples" in w and "gives 30" in w for w in data.warnings)
    with pytest.raises(DatasetError, match="asked for 128"):
        windows(text, samples=128, strict=True)


def test_enough_tokens_of_a_broad_text_warn_about_nothing() -> None:
    words = " ".join(f"w{i * 7919 % 100003}" for i in range(20000))
    data = windows(words, samples=16, seq_len=1024, strict=True)
    assert data.warnings == []
    assert data.fingerprint["tokens"] == 16384


def test_fewer_tokens_than_advised_warn() -> None:
    assert any("200 tokens, advised" in warning for warning in windows().warnings)


@pytest.mark.parametrize("text", ["", "  \n "])
def test_an_empty_text_is_a_named_error(text: str) -> None:
    with pytest.raises(DatasetError, match="'dataset' holds no text"):
        windows(text)


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_sample_of_four_tokens_is_a_named_error(length: int) -> None:
    with pytest.raises(DatasetError, match=f"holds {length} tokens, wanted at least 8"):
        windows("x" * length)


def test_a_text_shorter_than_a_window_is_one_sample() -> None:
    data = windows("twelve chars", seq_len=50)
    assert data.tokens.shape == (1, 12)
    assert data.fingerprint["tokens"] == 12
    assert any("gives 1 (12 tokens)" in warning for warning in data.warnings)


@pytest.mark.parametrize(
    ("policy", "habit", "begins"),
    [("model", True, True), ("model", False, False), ("always", False, True), ("never", True, False)],
)
def test_the_bos_policy_is_followed_and_recorded(policy: str, habit: bool, begins: bool) -> None:
    data = windows(tokenizer=make_tokenizer(bos=True, adds_bos=habit), bos=policy)
    assert data.tokens.shape == (4, 50)
    assert bool((data.tokens[:, 0] == 0).all()) == begins
    assert not bool((data.tokens[:, 1:] == 0).any())
    assert data.fingerprint["bos"] == {"policy": policy, "token": 0 if begins else None}


def test_always_without_a_bos_token_is_a_named_error() -> None:
    with pytest.raises(DatasetError, match="no BOS token"):
        windows(bos="always")


def test_the_fingerprint_tells_texts_and_draws_apart() -> None:
    a, b, c = windows().fingerprint, windows(seed=1).fingerprint, windows(TEXT + "!").fingerprint
    assert a == windows().fingerprint
    assert a["text_sha256"] == b["text_sha256"] != c["text_sha256"]
    assert a["tokens_sha256"] != b["tokens_sha256"]


def test_tokens_longer_than_expected_still_fill_every_window() -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "x" * 40: 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    data = windows(("x" * 40 + " ") * 400, samples=5, seq_len=64, tokenizer=tokenizer)
    assert data.tokens.shape == (5, 64)
    assert bool((data.tokens == 1).all())
