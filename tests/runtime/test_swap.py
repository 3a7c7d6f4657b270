"""swap: what it replaces, what it reports, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from omniw4 import model as models
from omniw4.errors import ModelError, PatternError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_linear, relative_error
from tiny_models import MODELS, quantize_blocks

IDS = torch.arange(24).reshape(2, 12) * 7 % 300


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_is_the_model_with_dequantized_weights(name: str) -> None:
    """16-bit activations leave the weights as the only difference, so logits agree to FP32 rounding."""
    model, dense = MODELS[name](), MODELS[name]()
    quantized = quantize_blocks(model, LinearSpec(act_bits=16, smooth=True))
    for path, linear in models.block_linears(dense).items():
        linear.weight.data = quantized[path].dequantize()
        if linear.bias is not None:
            linear.bias.data = quantized[path].bias.float()
    report = swap(model, quantized)
    assert report.replaced == list(quantized)
    assert report.not_replaced == {"lm_head": "the checkpoint does not quantize it"}
    assert {p for p, m in model.named_modules() if isinstance(m, W4A4Linear)} == set(quantized)
    with torch.no_grad():
        assert relative_error(model(IDS).logits, dense(IDS).logits) < 1e-5


def test_batch_and_single_sequences_agree() -> None:
    model = MODELS["qwen3"]()
    swap(model, quantize_blocks(model, LinearSpec()))
    with torch.no_grad():
        assert relative_error(model(IDS).logits[1], model(IDS[1:]).logits[0]) < 1e-5


def test_patterns_choose_and_the_report_says_why() -> None:
    model = MODELS["llama"]()
    quantized = quantize_blocks(model, LinearSpec())
    report = swap(model, quantized, include=["*.mlp.*", "re:.*[qk]_proj"], skip=["*.down_proj"])
    assert {path.rsplit(".", 1)[1] for path in report.replaced} == {"q_proj", "k_proj", "gate_proj", "up_proj"}
    assert len(report.replaced) == 8
    assert report.not_replaced == {
        **{f"model.layers.{i}.self_attn.{n}_proj": "no include pattern matches it" for i in (0, 1) for n in "vo"},
        **{f"model.layers.{i}.mlp.down_proj": "skip pattern '*.down_proj'" for i in (0, 1)},
        "lm_head": "the checkpoint does not quantize it",
    }


@pytest.mark.parametrize("flag", ["include", "skip"])
def test_a_pattern_that_matches_nothing_is_an_error(flag: str) -> None:
    model = MODELS["llama"]()
    with pytest.raises(PatternError, match=f"{flag} pattern 'lm_head' matches none of 14 linears"):
        swap(model, quantize_blocks(model, LinearSpec()), **{flag: ["*.down_proj", "lm_head"]})
    assert not any(isinstance(module, W4A4Linear) for module in model.modules())


def network(bias: bool = True) -> nn.Module:
    return nn.ModuleDict({"first_proj": nn.Linear(64, 24, bias=bias), "act": nn.SiLU(), "last": nn.Linear(24, 8)})


@pytest.mark.parametrize(
    ("path", "linear", "message"),
    [
        ("first_porj", make_linear(24, 64), "no linear 'first_porj'; the most similar is 'first_proj'"),
        ("model.nothing", make_linear(24, 64), "no linear 'model.nothing'"),
        ("act", make_linear(24, 64), "act is a SiLU in the model, wanted an nn.Linear"),
        (
            "first_proj",
            make_linear(24, 128),
            r"first_proj: the quantized linear is \[24, 128\], the model's is \[24, 6",
        ),
        ("first_proj", make_linear(24, 64, bias=False), "first_proj: the model has a bias, the quantized linear has n"),
    ],
)
def test_misfits_are_named_and_change_nothing(path: str, linear: QuantizedLinear, message: str) -> None:
    model = network()
    fits = make_linear(24, 64)
    with pytest.raises(ModelError, match=message):
        swap(model, {"first_proj": fits, path: linear})
    assert type(model["first_proj"]) is nn.Linear


def test_a_bias_the_model_lacks_is_named() -> None:
    with pytest.raises(ModelError, match="first_proj: the quantized linear has a bias, the model has none"):
        swap(network(bias=False), {"first_proj": make_linear(24, 64)})


def test_swapping_again_replaces_the_quantized_linear() -> None:
    model = network()
    swap(model, {"first_proj": make_linear(24, 64)})
    swap(model, {"first_proj": make_linear(24, 64, seed=7)})
    assert_same(model["first_proj"].qweight, make_linear(24, 64, seed=7).qweight, "qweight")


def test_linears_are_read_once_and_only_those_wanted() -> None:
    class Lazy(Mapping[str, QuantizedLinear]):
        reads: list[str] = []  # noqa: RUF012

        def __getitem__(self, path: str) -> QuantizedLinear:
            self.reads.append(path)
            return make_linear(24, 64)

        def __iter__(self) -> Iterator[str]:
            return iter(("first_proj", "absent"))

        def __len__(self) -> int:
            return 2

    swap(network(), Lazy(), skip=["absent"])
    assert Lazy.reads == ["first_proj"]


def test_training_flag_is_kept() -> None:
    model = network().train()
    swap(model, {"first_proj": make_linear(24, 64)})
    assert model["first_proj"].training
    model.eval()
    swap(model, {"first_proj": make_linear(24, 64)})
    assert not model["first_proj"].training
