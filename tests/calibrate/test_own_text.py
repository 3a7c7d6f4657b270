"""Sampling from a model: the right distribution, through a cache, each sequence by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_models import OmniVoiceLike, make_tokenizer
from torch import nn

from omniw4.calibrate import own_text
from omniw4.calibrate.own_text import begin_token, check_causal, sample_tokens, write_text
from omniw4.calibrate.text import read_text
from omniw4.errors import DatasetError, ModelError, NonFiniteError, UsageError
from omniw4.model import LoadedModel
from tiny_models import llama, qwen3

SMALL = 8  # tokens of a vocabulary that frequencies can be counted of


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return qwen3(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """Few tokens of unequal probability."""
    return qwen3(vocab_size=SMALL, tie_word_embeddings=False)


def changed(model: nn.Module, change: Any) -> Any:
    """A hook that changes the logits; remove() ends it."""
    return model.lm_head.register_forward_hook(lambda module, args, logits: change(logits))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("build", [qwen3, llama])
def test_each_token_is_the_draw_from_a_forward_over_all_before_it(build: Any) -> None:
    """Without cache or batch: the same random numbers, the last row of logits of the whole prefix."""
    model = build(tie_word_embeddings=False)
    found = sample_tokens(model, 5, 2, 20, temperature=0.7, seed=3, batch_size=2)
    for index in range(2):
        generator = torch.Generator().manual_seed(own_text._seed_of(3, index))
        tokens = [5]
        while len(tokens) < 20:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
            noise = torch.empty_like(logits).exponential_(generator=generator)
            tokens.append(int((logits.div(0.7).softmax(-1) / noise).argmax()))
        assert found[index].tolist() == tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_the_model_says(small: nn.Module, temperature: float) -> None:
    """Of the first token, whose distribution is the same for all sequences, by chi-square (7 degrees of freedom)."""
    count = 3000
    found = sample_tokens(small, 2, count, 8, temperature=temperature, batch_size=count)[:, 1].bincount(minlength=SMALL)
    with torch.no_grad():
        logits = small(input_ids=torch.tensor([[2]])).logits[0, -1].double()

    def distance(other: float) -> float:
        expected = count * (logits / other).softmax(-1)
        return float(((found - expected).square() / expected).sum())

    assert distance(temperature) < 29.9, "one in 10,000 seeds is beyond"
    assert all(distance(other) > 60 for other in (0.5, 1.0, 2.0) if other != temperature)


def test_the_batch_changes_no_sequence(model: nn.Module) -> None:
    whole = sample_tokens(model, 1, 5, 24, batch_size=5)
    for size in (1, 2, 32):
        assert torch.equal(sample_tokens(model, 1, 5, 24, batch_size=size), whole)
    assert torch.equal(sample_tokens(model, 1, 3, 24, batch_size=2), whole[:3]), "more samples change none before them"


def test_a_seed_is_a_set_of_sequences(model: nn.Module) -> None:
    rows = [tuple(row) for seed in (0, 1, 2) for row in sample_tokens(model, 1, 4, 16, seed=seed).tolist()]
    assert len(set(rows)) == 12, "neither within a seed nor between neighbouring ones"
    assert rows[:4] == [tuple(row) for row in sample_tokens(model, 1, 4, 16, seed=0).tolist()]


def test_a_cold_model_takes_the_likeliest(small: nn.Module) -> None:
    with torch.no_grad():
        likeliest = int(small(input_ids=torch.tensor([[2]])).logits[0, -1].argmax())
    assert sample_tokens(small, 2, 4, 8, temperature=1e-300)[:, 1].tolist() == [likeliest] * 4


def test_a_sequence_begins_with_the_token_and_goes_on_past_it(small: nn.Module) -> None:
    tokens = sample_tokens(small, 2, 6, 64)
    assert tokens.shape == (6, 64)
    assert tokens.dtype == torch.int64
    assert (tokens[:, 0] == 2).all()
    assert (tokens[:, 1:-1] == 2).any(dim=1).all()
    assert tokens.amax() == SMALL - 1


def test_progress_is_told_some_hundred_times(small: nn.Module) -> None:
    told: list[tuple[int, int, str]] = []
    sample_tokens(small, 2, 5, 128, batch_size=2, on_tokens=lambda *one: told.append(one))
    done = [one[0] for one in told]
    assert done == sorted(set(done))
    assert 100 <= len(told) <= 140
    assert told[-1] == (5 * 127, 5 * 127, "token 128 of sequences 5 to 5")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(small: nn.Module, bad: float) -> None:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits[-1, -1, 3] = bad
        return logits

    hook = changed(small, spoil)
    with pytest.raises(NonFiniteError, match="Qwen3ForCausalLM in float32 gives NaN or inf") as error:
        sample_tokens(small, 2, 2, 8)
    assert "--dtype float32 or bfloat16" in error.value.hint
    hook.remove()


def test_one_bad_step_between_two_looks(small: nn.Module) -> None:
    calls = 0

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return logits * torch.nan if calls == 7 else logits

    hook = changed(small, spoil)
    with pytest.raises(NonFiniteError):
        sample_tokens(small, 2, 4, 128, batch_size=1)
    assert calls > 7
    hook.remove()


def test_a_token_that_is_ruled_out_is_no_error(small: nn.Module) -> None:
    assert (sample_tokens(small, 2, 20, 16)[:, 1:] == 3).any()
    hook = changed(small, lambda logits: logits.index_fill(-1, torch.tensor([3]), -torch.inf))
    assert not (sample_tokens(small, 2, 20, 16)[:, 1:] == 3).any()
    hook.remove()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples is 0, wanted at least 1"),
        ({"seq_len": 7}, "seq_len is 7, wanted at least 8"),
        ({"batch_size": 0}, "batch_size is 0, wanted at least 1"),
        ({"temperature": 0.0}, "temperature is 0.0, wanted a finite number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"seq_len": 257}, "257 tokens are longer than the 256 positions"),
    ],
)
def test_what_is_out_of_range(small: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sample_tokens(small, 2, **{"samples": 1, "seq_len": 8, **options})


def test_a_beginning_outside_the_vocabulary(small: nn.Module) -> None:
    with pytest.raises(ModelError, match="token 8 of the tokenizer is outside the model's vocabulary of 8"):
        sample_tokens(small, SMALL, 1, 8)


def test_a_model_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = qwen3(vocab_size=SMALL)
    real = model.forward

    def forgets(input_ids: torch.Tensor, cache: Any = None, use_cache: bool = True) -> Any:
        return real(input_ids=input_ids, use_cache=False)

    def knows_none(input_ids: torch.Tensor) -> Any:
        return real(input_ids=input_ids)

    for forward in (forgets, knows_none):
        monkeypatch.setattr(model, "forward", forward)
        with pytest.raises(ModelError, match="no keys and values"):
            sample_tokens(model, 2, 1, 8)


def test_who_can_write() -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    bert = transformers.BertConfig(**sizes, num_attention_heads=2)
    t5 = transformers.T5Config(vocab_size=32, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)
    with torch.device("meta"):
        others = [qwen3().model, transformers.BertForMaskedLM(bert), transformers.T5ForConditionalGeneration(t5)]
    for model in (*others, OmniVoiceLike()):
        with pytest.raises(ModelError, match=f"'mine' is a {type(model).__name__}, which writes no text") as error:
            check_causal(model, "mine")
        assert "--dataset" in error.value.hint
    for model in (qwen3(), llama()):
        check_causal(model, "mine")


def test_what_a_text_begins_with() -> None:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.eos_token = "a"
    assert begin_token(tokenizer, "mine") == 0, "BOS before EOS, also where its id is 0"
    without = make_tokenizer()
    without.eos_token = "a"
    assert begin_token(without, "mine") == without.convert_tokens_to_ids("a")
    assert begin_token(tokenizer, "mine", "a") == tokenizer.convert_tokens_to_ids("a")
    with pytest.raises(ModelError, match="no token 'nowhere'"):
        begin_token(tokenizer, "mine", "nowhere")
    with pytest.raises(ModelError, match="neither a BOS nor an EOS token"):
        begin_token(make_tokenizer(), "mine")
    with pytest.raises(ModelError, match="'mine' has no tokenizer"):
        begin_token(None, "mine")


def loaded(model: nn.Module) -> LoadedModel:
    return LoadedModel(model, make_tokenizer(bos=True), "mine", "hash")


def test_text_is_read_back_as_it_was_written(model: nn.Module, tmp_path: Path) -> None:
    """Byte by byte, with whatever is in it; a JSON line each."""
    own = write_text(loaded(model), 6, 40, seed=1)
    tokens = sample_tokens(model, 0, 6, 40, seed=1)
    assert (own.empty, own.tokens, own.begin) == (0, 6 * 39, 0)
    alphabet = loaded(model).tokenizer
    assert own.texts == [alphabet.decode([t for t in row if 0 < t < 257]) for row in tokens[:, 1:].tolist()]  # type: ignore[union-attr]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in own.texts), encoding="utf-8")
    assert read_text(file) == own.texts


def test_empty_texts_are_left_out_and_counted(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(bos=True)
    a, space = tokenizer("a ")["input_ids"]
    rows = [[0, a, 0, a], [0, 0, 0, 0], [0, space, 0, space], [0, a, 299, 0]]
    monkeypatch.setattr(own_text, "sample_tokens", lambda *_, **__: torch.tensor(rows))
    own = write_text(loaded(model), 4, 8)
    assert (own.texts, own.empty) == (["aa", "a"], 2)
    rows[0] = rows[3] = rows[1]
    with pytest.raises(DatasetError, match="all 4 texts that model 'mine' wrote are empty"):
        write_text(loaded(model), 4, 8)
