"""Capture against plain forwards: what is counted, what is shared, what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibration_models import MODELS, assert_same, naive_statistics, token_set
from torch import nn

from collected import Collected
from omniw4.calibrate.accumulate import Accumulator
from omniw4.calibrate.capture import capture
from omniw4.calibrate.dataset import TokenSet
from omniw4.calibrate.sources import TokenSource
from omniw4.calibrate.walk import Batch, BlockWalk
from omniw4.errors import ModelError, NonFiniteError
from omniw4.model import block_linears, find_backbone
from tiny_models import llama, qwen3


def captured(model: nn.Module, data: TokenSet, batch_size: int = 1) -> Collected:
    sink = Collected()
    capture(model, TokenSource(data), sink, batch_size=batch_size)
    return sink


def one_by_one(data: TokenSet) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Each sample alone, cut to its real tokens: nothing of padding can get in."""
    lengths = data.mask.sum(1).tolist()
    return [
        ({"input_ids": row[None, :n]}, torch.ones(1, n, dtype=torch.bool))
        for row, n in zip(data.tokens, lengths, strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[24, 24, 24], [24, 9, 1, 17, 24]], ids=["full", "padded"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_equals_plain_forwards_over_the_real_tokens(name: str, lengths: list[int], batch_size: int) -> None:
    model, data = MODELS[name](), token_set(lengths)
    found = captured(model, data, batch_size).stats
    wanted = naive_statistics(model, one_by_one(data))
    assert found.keys() == wanted.keys() == block_linears(model).keys()
    for path in wanted:
        assert_same(found[path], wanted[path], path)


def test_what_padding_holds_changes_no_bit() -> None:
    model = qwen3()
    a = captured(model, token_set([24, 9, 1], pad=0), 3).stats
    b = captured(model, token_set([24, 9, 1], pad=123), 3).stats
    for path in a:
        assert torch.equal(a[path].hessian, b[path].hessian), path
        assert torch.equal(a[path].absmax, b[path].absmax), path


def test_linears_that_read_one_input_share_one_accumulator() -> None:
    groups = captured(qwen3(), token_set([24])).groups
    members = [[name.rpartition(".")[2] for name in group.members] for group in groups]
    assert members == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]] * 2
    assert [group.in_features for group in groups] == [128, 128, 128, 192] * 2


def test_memory_is_one_block_of_sums_and_one_set_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    hidden: list[int] = []
    walks: list[BlockWalk] = []
    original = BlockWalk.__init__
    monkeypatch.setattr(BlockWalk, "__init__", lambda self, *a: (original(self, *a), walks.append(self))[0])

    def look(done: int, total: int, path: str) -> None:
        gc.collect()
        alive.append(sum(type(o) is Accumulator for o in gc.get_objects()))
        hidden.append(sum(t.numel() for t in walks[0]._hidden if t is not None))

    capture(llama(num_hidden_layers=4), TokenSource(token_set([24] * 6)), Collected(), batch_size=4, on_block=look)
    assert alive == [0] * 4
    assert hidden == [6 * 24 * 128] * 4


def test_the_model_is_left_as_it_was() -> None:
    model, data = qwen3(), token_set([24, 12])
    inputs = {"input_ids": data.tokens, "attention_mask": data.mask.long()}
    before = model(**inputs).logits
    captured(model, data)
    with pytest.raises(RuntimeError, match="full disk"):
        capture(model, TokenSource(data), FullDisk())
    assert torch.equal(model(**inputs).logits, before)
    assert not any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())


class FullDisk(Collected):
    def put(self, group: Any, stats: Any) -> None:
        raise RuntimeError("full disk")


def with_infinite_token(model: nn.Module, token: int) -> nn.Module:
    find_backbone(model)[1].embed_tokens.weight.data[token, 5] = float("inf")
    return model


def test_rows_with_inf_are_left_out_and_counted() -> None:
    data = token_set([24, 24])
    data.tokens[data.tokens == 299] = 298
    data.tokens[1, 22:] = 299  # the last tokens of a causal model: no other row sees them
    found = captured(with_infinite_token(qwen3(), 299), data, 2).stats
    wanted = captured(qwen3(), token_set_cut(data, 1, 22), 2).stats
    for path, stats in found.items():
        assert (stats.tokens, stats.excluded) == (46, 2), path
        wanted[path].excluded = 2
        assert_same(stats, wanted[path], path)


def token_set_cut(data: TokenSet, row: int, length: int) -> TokenSet:
    mask = data.mask.clone()
    mask[row, length:] = False
    return TokenSet(data.tokens.masked_fill(~mask, 0), mask, data.fingerprint)


def test_too_many_rows_with_inf_stop_with_the_name_of_the_layer() -> None:
    data = token_set([24, 24])
    data.tokens[data.tokens == 299] = 298
    data.tokens[1, 12:17] = 299
    with pytest.raises(NonFiniteError, match=r"5 of 48 .* model\.layers\.0\.self_attn\.q_proj.* more than 10%"):
        captured(with_infinite_token(qwen3(), 299), data)


def test_an_overflow_in_a_block_stays_in_its_row() -> None:
    data = token_set([24, 24])
    model = qwen3(num_hidden_layers=3)
    overflow(model.model.layers[0], row=3)
    overflow(model.model.layers[1], row=7)
    found = captured(model, data).stats
    for path, stats in found.items():
        lost = {"0": 0, "1": 2, "2": 4}[path.split(".")[2]]
        assert (stats.tokens, stats.excluded) == (48 - lost, lost), path
        assert bool(stats.hessian.isfinite().all()), path


def overflow(block: nn.Module, row: int) -> None:
    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(1, torch.tensor([row]), float("inf"))

    block.mlp.down_proj.register_forward_hook(hook)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_either_attention_gives_the_statistics(attention: str) -> None:
    data = token_set([24, 7])
    model = qwen3(attn_implementation=attention)
    wanted = naive_statistics(model, one_by_one(data))
    for path, stats in captured(model, data, 2).stats.items():
        assert_same(stats, wanted[path], path)


def test_sliding_window_blocks_get_their_own_masks() -> None:
    data = token_set([24, 20])
    model = qwen3(
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    wanted = naive_statistics(model, one_by_one(data))
    for path, stats in captured(model, data, 2).stats.items():
        assert_same(stats, wanted[path], path)


class Toy(nn.Module):
    """Two linear blocks with whatever the tests want around them."""

    def __init__(self, block: Callable[[], nn.Module], between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.between = between

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(input_ids)
        for layer in self.layers:
            out = layer(hidden_states=self.between(h))
            h = out[0] if isinstance(out, tuple) else out
        return h


class TupleBlock(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.proj, self.extra = nn.Linear(64, 64), extra

    def forward(self, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        return (hidden_states + self.proj(hidden_states).relu(), self.extra)


class UnusedLinear(TupleBlock):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(64, 64)


def test_blocks_that_return_tuples_and_take_keywords() -> None:
    model, data = Toy(TupleBlock, lambda h: h), token_set([24, 24])
    found = captured(model, data).stats
    x = model.embed(data.tokens).flatten(0, 1)
    wanted = model.layers[0](x)[0].detach()
    gram = (wanted.T @ wanted / len(wanted)).double()
    assert (found["layers.1.proj"].hessian.double() - gram).norm() <= 1e-5 * gram.norm()


def test_a_linear_that_no_token_reaches_has_no_tokens() -> None:
    found = captured(Toy(UnusedLinear, lambda h: h), token_set([24])).stats
    assert found["layers.0.expert"].tokens == 0
    assert found["layers.0.proj"].tokens == 24


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Toy(TupleBlock, lambda h: h * 1.5), r"change between layers\.0 and layers\.1"),
        (lambda: Toy(lambda: TupleBlock(torch.ones(1)), lambda h: h), r"layers\.0 hands more than hidden states"),
    ],
    ids=["scaled between blocks", "second output"],
)
def test_a_model_that_cannot_be_walked_is_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        captured(model(), token_set([24]))


def test_a_block_that_never_runs_is_refused() -> None:
    model = Toy(TupleBlock, lambda h: h)
    model.layers.append(TupleBlock())
    model.forward = lambda input_ids, **_: model.layers[1](model.layers[0](model.embed(input_ids))[0])  # type: ignore
    with pytest.raises(ModelError, match=r"layers\.2 is never run"):
        captured(model, token_set([24]))


def test_a_walk_hands_a_changed_blocks_outputs_on() -> None:
    """Sequential propagation: a block may be changed after its inputs were seen and before its outputs are made."""
    model, data = qwen3(), token_set([24, 24, 11])
    walk = BlockWalk(model, TokenSource(data), batch_size=2)
    masks: list[Batch] = []
    walk.run(0, masks.append, advance=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    walk.run(0, masks.append)
    assert [batch.mask.shape[0] for batch in masks] == [2, 1, 2, 1]
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(input_ids=data.tokens[:2])
    handle.remove()
    assert (walk._hidden[0] - seen[0]).norm() <= 1e-6 * seen[0].norm()
    with pytest.raises(ModelError, match="out of turn"):
        walk.run(0)
