"""Held-out data for models that are not plain language models: captured hidden states, heads, no head at all."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3Config, Qwen3Model

from omniw4.errors import DatasetError, UsageError
from omniw4.model import LoadedModel, block_linears, find_linears
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from omniw4.verify.evaluate import compare
from omniw4.verify.heldout import is_held_out, prepare
from tiny_checkpoint import SIZES, make_tokenizer, quantize_nearest

WIDTH = SIZES["hidden_size"]


class Speech(nn.Module):
    """The shape of OmniVoice: a backbone called ``llm``, and heads for several codebooks beside it."""

    def __init__(self):
        super().__init__()
        self.llm = Qwen3Model(Qwen3Config(**SIZES))
        self.audio_heads = nn.Linear(WIDTH, 3 * 11, bias=False)
        self.config = SimpleNamespace(num_audio_codebook=3)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


def loaded(model, tokenizer=None):
    return LoadedModel(model, tokenizer, "test", "0" * 64)


@pytest.fixture
def hidden_file(tmp_path):
    """Three sequences of 12; the last four positions of the second are padding that holds NaN."""
    torch.manual_seed(0)
    hidden, mask = torch.randn(3, 12, WIDTH), torch.ones(3, 12, dtype=torch.bool)
    mask[1, 8:] = False
    hidden[1, 8:] = float("nan")
    save_file({"hidden_states": hidden, "mask": mask}, tmp_path / "hidden.safetensors", {"attention": "bidirectional"})
    return tmp_path / "hidden.safetensors"


def test_heads_of_a_speech_model(hidden_file):
    a, b = seeded(Speech), seeded(Speech)
    with torch.no_grad():
        b.llm.layers[0].mlp.down_proj.weight.mul_(200)
    data = prepare(loaded(a), str(hidden_file), 3, 512, None, None)
    found = compare(data.forward(a), data.forward(b), data.items)
    assert found.tokens == 12 + 8 + 12
    assert found.rows == 3 * found.tokens
    assert found.finite
    assert 0 < found.hidden_error < 1
    assert found.kl > 0
    assert 0 < found.argmax_agreement < 1
    assert found.ratio is None
    assert data.no_perplexity == "captured hidden states carry no labels"
    same = compare(data.forward(a), data.forward(a), data.items)
    assert (same.hidden_error, same.kl, same.argmax_agreement) == (0.0, 0.0, 1.0)


def test_a_quantized_model_is_run_the_same_way(hidden_file):
    """Its blocks hold no nn.Linear by which they could be found."""
    a, b = seeded(Speech), seeded(Speech)
    spec = LinearSpec(act_bits=16, rank=16)
    with torch.no_grad():
        linears = {p: quantize_nearest(m.weight, m.bias, spec) for p, m in block_linears(b).items()}
    swap(b, linears)
    assert not find_linears(b.llm)
    data = prepare(loaded(a), str(hidden_file), 3, 512, None, None)
    found = compare(data.forward(a), data.forward(b), data.items)
    assert 0 < found.hidden_error < 0.05
    assert found.rows == 3 * found.tokens


def test_agreement_is_that_of_each_codebook(hidden_file):
    a, b = seeded(Speech), seeded(Speech)
    with torch.no_grad():
        b.audio_heads.weight[11:22].neg_()  # the second codebook of three answers otherwise
    data = prepare(loaded(a), str(hidden_file), 1, 512, None, None)
    found = compare(data.forward(a), data.forward(b), data.items)
    assert found.hidden_error == 0.0
    assert 2 / 3 <= found.argmax_agreement < 0.8


def test_fewer_sequences_than_asked_is_said(hidden_file):
    data = prepare(loaded(seeded(Speech)), str(hidden_file), 16, 512, None, None)
    assert data.record["count"] == 3
    assert data.record["samples"] == [0, 1, 2]
    assert "3 of the 16 sequences" in data.warnings[0]
    two = prepare(loaded(seeded(Speech)), str(hidden_file), 2, 512, None, None)
    assert two.record["samples"] == [0, 2]


def test_the_source_of_the_calibration_is_warned_about(hidden_file):
    first = prepare(loaded(seeded(Speech)), str(hidden_file), 3, 512, None, None)
    calibration = {"data": {"source_sha256": first.record["source_sha256"], "bos": {"policy": "source", "token": None}}}
    second = prepare(loaded(seeded(Speech)), str(hidden_file), 3, 512, None, calibration)
    assert "is the text of the calibration" in second.warnings[0]
    assert (first.record["held_out"], second.record["held_out"]) == (True, False), "data-free, and the same source"
    assert second.bos["same"] is None


@pytest.mark.parametrize(
    ("uses", "found"),
    [
        ([], True), ([{"text_sha256": "b"}], True), ([{"text_sha256": "a"}], False), ([{}], None),
        ([{"source_sha256": "b"}], None), ([{"text_sha256": "b"}, {"text_sha256": "a"}], False),
        ([{"source_sha256": "b"}, {"text_sha256": "a"}], False), ([{"source_sha256": "b"}, {"text_sha256": "b"}], None),
    ],
)  # fmt: skip
def test_held_out_is_told_only_where_texts_can_be_compared(uses, found):
    assert is_held_out({"text_sha256": "a"}, uses) is found


def test_hidden_states_of_a_language_model_are_judged_by_its_head(hidden_file):
    model = seeded(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)))
    data = prepare(loaded(model), str(hidden_file), 3, 512, None, None)
    found = compare(data.forward(model), data.forward(model), data.items)
    assert found.rows == found.tokens
    assert found.argmax_agreement == 1.0


def test_a_model_without_any_head_has_its_hidden_states_compared():
    a, b = (seeded(lambda: LlamaModel(LlamaConfig(**SIZES)), seed) for seed in (0, 1))
    data = prepare(loaded(a, make_tokenizer(adds_bos=True)), None, 2, 24, None, None)
    found = compare(data.forward(a), data.forward(b), data.items)
    assert found.hidden_error > 0.1
    assert (found.kl, found.argmax_agreement, found.ratio) == (None, None, None)
    assert data.no_perplexity == "LlamaModel has no language head"


def test_heads_that_do_not_predict_text_give_no_perplexity():
    model = seeded(Speech)
    data = prepare(loaded(model, make_tokenizer(adds_bos=True)), None, 2, 24, None, None)
    found = compare(data.forward(model), data.forward(model), data.items)
    assert found.rows == 3 * found.tokens == 3 * 2 * 23
    assert found.ratio is None
    assert data.no_perplexity == "Speech has no language head"


def test_text_for_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(DatasetError, match="has no tokenizer"):
        prepare(loaded(seeded(Speech)), None, 2, 24, None, None)


def test_windows_beyond_the_positions_of_the_model_are_refused():
    model = seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 16})))
    with pytest.raises(UsageError, match="24 tokens are longer than the 16 positions"):
        prepare(loaded(model, make_tokenizer(adds_bos=True)), None, 2, 24, None, None)


@pytest.mark.parametrize(("policy", "token"), [("model", None), ("always", 0), ("never", None)])
def test_bos_policies(policy, token):
    """A tokenizer that has a BOS token and does not add it by itself."""
    model = seeded(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)))
    data = prepare(loaded(model, make_tokenizer(adds_bos=False)), None, 2, 24, policy, None)
    assert data.bos["evaluation"] == {"policy": policy, "token": token}
    assert (int(data.items[0].inputs["input_ids"][0, 0]) == 0) is (token == 0)
    assert data.items[0].inputs["input_ids"].shape == (1, 24)


def test_an_unknown_policy_is_refused():
    with pytest.raises(UsageError, match="often"):
        prepare(loaded(seeded(Speech)), None, 2, 24, "often", None)
