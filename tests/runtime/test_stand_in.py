"""Quantized linears that stand in: what they answer, what hooks see, and what is left afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from collected import Collected
from omniw4 import int4
from omniw4 import model as models
from omniw4.calibrate import capture
from omniw4.calibrate.dataset import TokenSet
from omniw4.calibrate.sources import TokenSource
from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError
from omniw4.hadamard import hadamard64
from omniw4.runtime.stand_in import stand_in, stand_in_by_block
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_linear, relative_error
from tiny_models import MODELS, quantize_blocks, write_checkpoint

IDS = torch.arange(72).reshape(3, 24) * 7 % 300
DATA = TokenSet(IDS, torch.ones_like(IDS, dtype=torch.bool), {})
INT4 = LinearSpec(smooth=True, act_clip=0.95)
OVERRIDES = {"up_proj": LinearSpec(act_bits=8, rank=0), "o_proj": LinearSpec(act_bits=16, rotation="none")}


def captured(model: nn.Module, **options: Any) -> Collected:
    sink = Collected()
    capture(model, TokenSource(DATA), sink, batch_size=2, **options)
    return sink


def answer(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """The definition: y = deq(q(x'))·deq(qweight)ᵀ + (x'·proj_down)·proj_upᵀ + bias with x' = (x / smooth)·H64."""
    spec, y = linear.spec, x.float()
    if linear.smooth is not None:
        y = y * linear.smooth.float().reciprocal()
    if spec.rotation == "hadamard64":
        y = hadamard64(y)
    grid = y
    if spec.act_bits < 16:
        quantize = int4.quantize_tokens if spec.act_bits == 8 else int4.quantize_groups
        grid = int4.dequantize(*quantize(y, spec.act_clip))
    out = F.linear(grid, linear.dequantize_codes(), None if linear.bias is None else linear.bias.float())
    if linear.proj_down is not None and linear.proj_up is not None:
        out = out + (y @ linear.proj_down.float()) @ linear.proj_up.float().T
    return out


@torch.no_grad()
def inputs_by_definition(model: nn.Module, quantized: dict[str, QuantizedLinear]) -> dict[str, torch.Tensor]:
    """Rows [T, K] that each linear reads in one plain forward in which every linear's answer is replaced."""
    rows: dict[str, torch.Tensor] = {}

    def hook(path: str) -> Any:
        def replaced(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            rows[path] = args[0].flatten(0, 1)
            return answer(quantized[path], args[0]) if path in quantized else output

        return replaced

    handles = [linear.register_forward_hook(hook(path)) for path, linear in models.block_linears(model).items()]
    model(IDS)
    for handle in handles:
        handle.remove()
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stood_in_for_answers_as_the_swapped_one(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    quantized = quantize_blocks(model, INT4, OVERRIDES)
    swap(other, quantized)
    with torch.no_grad():
        before = model(IDS).logits
        with stand_in(model, quantized):
            assert_same(model(IDS).logits, other(IDS).logits, "logits")
        assert_same(model(IDS).logits, before, "logits afterwards")
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", ["qwen3", "llama-bias"])
def test_calibration_sees_what_quantized_predecessors_make(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    quantized = write_checkpoint(model, tmp_path, INT4, OVERRIDES)
    model = models.load(tmp_path / "source").model
    plain = captured(model)
    found = captured(model, resident=stand_in_by_block(model, Checkpoint.open(tmp_path / "checkpoint")))
    assert found.groups == plain.groups
    wanted = inputs_by_definition(model, quantized)
    for path, stats in found.stats.items():
        rows = wanted[path].double()
        assert relative_error(stats.hessian, rows.T @ rows / len(rows)) < 1e-5, path
        assert relative_error(stats.absmax, rows.abs().amax(0)) < 1e-5, path
        assert stats.tokens == IDS.numel()
        first = path.startswith("model.layers.0.self_attn.") and not path.endswith("o_proj")
        if first:  # nothing before it is quantized
            for part in ("hessian", "hessian_normalized", "absmax", "rms"):
                assert_same(getattr(stats, part), getattr(plain.stats[path], part), f"{path} {part}")
        else:
            assert relative_error(stats.hessian, plain.stats[path].hessian) > 1e-4, path


def test_linears_left_as_they_were_stay() -> None:
    """A checkpoint of the second block alone changes no input of the first, nor what enters the second."""
    model = MODELS["qwen3"]()
    quantized = quantize_blocks(model, INT4)
    second = {path: linear for path, linear in quantized.items() if path.startswith("model.layers.1.")}
    plain = captured(model).stats

    class SecondBlock:
        specs = second
        linear = staticmethod(second.__getitem__)

    found = captured(model, resident=stand_in_by_block(model, SecondBlock())).stats  # type: ignore[arg-type]
    changed = {path for path in plain if not torch.equal(plain[path].hessian, found[path].hessian)}
    behind = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert changed == {f"model.layers.1.{name}" for name in behind}


def test_only_the_block_that_runs_is_read() -> None:
    model = MODELS["llama"]()
    quantized = quantize_blocks(model, INT4)
    read: list[str] = []

    class Counting:
        specs = quantized

        def linear(self, path: str) -> QuantizedLinear:
            read.append(path)
            return quantized[path]

    enter = stand_in_by_block(model, Counting())  # type: ignore[arg-type]
    with enter(1):
        assert read == [path for path in quantized if path.startswith("model.layers.1.")]
        assert {p for p, m in model.named_modules() if "forward" in m.__dict__} == set(read)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("path", "linear", "message"),
    [
        ("first_porj", make_linear(24, 64), "no linear 'first_porj'; the most similar is 'first_proj'"),
        ("last", make_linear(24, 64), r"last: the quantized linear is \[24, 64\], the model's is \[8, 24\]"),
        ("first_proj", make_linear(24, 64, bias=False), "first_proj: the model has a bias, the quantized linear has n"),
    ],
)
def test_misfits_are_named_and_change_nothing(path: str, linear: QuantizedLinear, message: str) -> None:
    model = nn.ModuleDict({"first_proj": nn.Linear(64, 24), "last": nn.Linear(24, 8)})
    with pytest.raises(ModelError, match=message), stand_in(model, {"first_proj": make_linear(24, 64), path: linear}):
        pass
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_its_own_comes_back_after_an_error() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 24)})
    own = model["proj"].forward = lambda x: x[..., :24]

    def interrupted() -> None:
        with stand_in(model, {"proj": make_linear(24, 64)}):
            assert model["proj"].forward is not own
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        interrupted()
    assert model["proj"].forward is own
