"""Perplexity, KL and agreement against formulas written out by hand."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from omniw4.errors import ModelError
from omniw4.verify.evaluate import SLICE, Comparison, Forward, Item, Outputs, compare, text_items


def table_model(table):
    """A model whose logits after token t are row t of ``table [V, V]``."""
    return Forward(lambda input_ids, use_cache: SimpleNamespace(logits=table[input_ids]))


def by_hand(p_table, q_table, windows):
    """Mean NLL of both, KL and agreement in FP64, position by position."""
    nll_p = nll_q = kl = same = count = 0.0
    for row in windows.tolist():
        for now, then in itertools.pairwise(row):
            p, q = (t[now].double().softmax(-1) for t in (p_table, q_table))
            nll_p -= math.log(p[then])
            nll_q -= math.log(q[then])
            kl += float((p * (p / q).log()).sum())
            same += int(p.argmax() == q.argmax())
            count += 1
    return nll_p / count, nll_q / count, kl / count, same / count


@pytest.mark.parametrize("length", [2, 17, SLICE, SLICE + 1, SLICE + 2, 2 * SLICE + 3])
def test_figures_equal_the_formulas(length):
    torch.manual_seed(length)
    p_table, q_table = torch.randn(11, 11) * 3, torch.randn(11, 11) * 3
    windows = torch.randint(0, 11, (3, length))
    found = compare(table_model(p_table), table_model(q_table), text_items(windows))
    nll_p, nll_q, kl, same = by_hand(p_table, q_table, windows)
    assert found.tokens == found.labelled == 3 * (length - 1)
    assert found.perplexity_reference == pytest.approx(math.exp(nll_p), rel=1e-5)
    assert found.perplexity_quantized == pytest.approx(math.exp(nll_q), rel=1e-5)
    assert found.ratio == pytest.approx(math.exp(nll_q - nll_p), rel=1e-5)
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert found.argmax_agreement == pytest.approx(same)


def test_a_model_against_itself():
    table = torch.randn(7, 7)
    found = compare(table_model(table), table_model(table), text_items(torch.randint(0, 7, (2, 30))))
    assert (found.kl, found.argmax_agreement, found.ratio, found.finite) == (0.0, 1.0, 1.0, True)


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    windows = torch.randint(0, 50, (2, 40))
    found = compare(table_model(torch.zeros(50, 50)), table_model(torch.ones(50, 50)), text_items(windows))
    assert found.perplexity_reference == pytest.approx(50)
    assert found.perplexity_quantized == pytest.approx(50)


def test_labels_are_shifted_by_one():
    """A model that predicts its own input token for certain is sure of the wrong thing unless tokens repeat."""
    copies = table_model(torch.eye(4) * 100)
    constant = compare(copies, copies, text_items(torch.tensor([[2, 2, 2, 2]])))
    moving = compare(copies, copies, text_items(torch.tensor([[0, 1, 2, 3]])))
    assert constant.perplexity_reference == pytest.approx(1.0)
    assert moving.perplexity_reference > 1e40


def test_half_precision_logits_are_judged_in_fp32():
    """A logit of 100 and 49 999 zeros: FP16 cannot even hold the number of classes' sum."""
    logits = torch.zeros(1, 3, 50_000, dtype=torch.float16)
    model = Forward(lambda input_ids, use_cache: SimpleNamespace(logits=logits))
    found = compare(model, model, text_items(torch.tensor([[0, 1, 2]])))
    assert found.perplexity_reference == pytest.approx(50_000, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_noticed(bad):
    table = torch.zeros(5, 5)
    broken = table.clone()
    broken[3, 2] = bad
    windows = torch.tensor([[0, 3, 1]])
    found = compare(table_model(table), table_model(broken), text_items(windows))
    assert not found.finite
    assert math.isnan(found.kl)
    assert math.isnan(found.ratio)


def test_a_perplexity_too_large_for_a_float_is_infinite():
    found = Comparison(labelled=1, nll_reference=1e4, nll_quantized=2e4)
    assert found.perplexity_quantized == math.inf


def test_another_vocabulary_is_refused():
    windows = text_items(torch.tensor([[0, 1, 2]]))
    with pytest.raises(ModelError, match="quantized model"):
        compare(table_model(torch.zeros(5, 5)), table_model(torch.zeros(5, 6)), windows)


def test_hidden_states_and_heads_of_a_model_without_logits():
    """Two codebooks of three entries over hidden width 4; one of five positions does not count."""
    torch.manual_seed(0)
    heads = torch.nn.Linear(4, 6, bias=False)
    shift = torch.zeros(1, 5, 4)
    shift[0, 1, 2] = 3.0
    keep = torch.tensor([True, True, True, True, False])
    item = Item({"inputs_embeds": torch.randn(1, 5, 4)}, keep)

    def backbone(delta):
        return lambda inputs_embeds: SimpleNamespace(last_hidden_state=inputs_embeds + delta)

    found = compare(Forward(backbone(0.0), heads, 2), Forward(backbone(shift), heads, 2), [item])
    h = item.inputs["inputs_embeds"][0, :4]
    assert found.tokens == 4
    assert found.rows == 8
    assert found.hidden_error == pytest.approx(float(9.0 / h.square().sum()), rel=1e-5)
    same = heads(h).reshape(8, 3).argmax(-1) == heads(h + shift[0, :4]).reshape(8, 3).argmax(-1)
    assert found.argmax_agreement == pytest.approx(float(same.float().mean()))
    assert found.perplexity_reference is None
    assert found.ratio is None


def test_a_model_without_heads_has_hidden_error_alone():
    item = Item({"inputs_embeds": torch.ones(1, 2, 4)}, torch.ones(2, dtype=torch.bool))
    forward = Forward(lambda inputs_embeds: SimpleNamespace(last_hidden_state=inputs_embeds))
    found = compare(forward, forward, [item])
    assert (found.hidden_error, found.kl, found.argmax_agreement) == (0.0, None, None)


def test_outputs_without_anything_are_refused():
    item = Item({}, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ModelError, match="neither logits nor"):
        compare(Forward(lambda: SimpleNamespace()), Forward(lambda: SimpleNamespace()), [item])


def test_progress_counts_every_window():
    seen = []
    table = torch.zeros(5, 5)
    compare(
        table_model(table),
        table_model(table),
        text_items(torch.zeros(3, 4, dtype=torch.int64)),
        on_progress=seen.append,
    )
    assert [(p.stage, p.done, p.total) for p in seen] == [("evaluate", 1, 3), ("evaluate", 2, 3), ("evaluate", 3, 3)]
    assert seen[-1].eta_seconds == 0.0


def test_outputs_of_two_kinds_are_refused():
    with pytest.raises(ModelError, match="quantized model"):
        Comparison().add(Outputs(logits=torch.zeros(2, 3)), Outputs(hidden=torch.zeros(2, 3)), None)
