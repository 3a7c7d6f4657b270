"""Gains are differences of the model's own losses, and the choice follows them."""

from __future__ import annotations

import pytest
import torch

from omniw4.tensors import LinearSpec
from omniw4.verify.evaluate import text_items
from omniw4.verify.sensitivity import Gain, Sensitivity, measure_sensitivity
from tiny_models import MODELS, quantize_blocks


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    model = MODELS["qwen3"]()
    linears = quantize_blocks(model, LinearSpec(rank=8), {"o_proj": LinearSpec(rank=8, act_bits=8)})
    items = text_items(torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(1)))
    before = model(items[0].inputs["input_ids"]).logits.detach()
    seen: list[tuple[int, int, str]] = []
    result = measure_sensitivity(model, linears, items, on_linear=lambda *a: seen.append(a))
    assert torch.equal(model(items[0].inputs["input_ids"]).logits.detach(), before)
    assert [done for done, _, _ in seen] == list(range(1, 13))
    return result


def test_eight_bits_help(found: Sensitivity) -> None:
    assert found.kind == "logits"
    assert found.all_at_8 < 0.8 * found.baseline
    assert len(found.gains) == 12  # the two o_proj have 8 bits already
    assert all(gain.gain == pytest.approx(found.baseline - gain.loss) for gain in found.gains)
    assert [g.gain for g in found.gains] == sorted((g.gain for g in found.gains), reverse=True)
    # gains nearly add up
    assert sum(g.gain for g in found.gains) == pytest.approx(found.baseline - found.all_at_8, rel=0.5)


def test_choosing_by_count_and_by_weights() -> None:
    gains = [Gain("a", 0, 0.4, 100), Gain("b", 0, 0.3, 10), Gain("c", 0, 0.1, 50), Gain("d", 0, -0.1, 40)]
    found = Sensitivity("logits", 1.0, 0.3, gains)
    assert found.choose(0.5) == ["a", "b"]
    assert found.choose(1.0) == ["a", "b", "c"]
    assert found.choose(0.2) == []
    assert found.choose(0.3, by="weights") == ["b", "c"]  # of 200 weights 60
    assert found.choose(0.56, by="weights") == ["b", "a"]
