"""Linears with integer group scales as modules: dequantized weights, state dicts, moving, and a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from omniw4.int4 import pack_nibbles
from omniw4.quantize.scales import round_to_nearest
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec, QuantizedLinear
from omniw4.verify.layers import evaluate_codes
from problems import assert_same, make_input, relative_error


def quantized(act_bits: int, n: int = 72, k: int = 192) -> tuple[torch.Tensor, QuantizedLinear]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05
    rounded = round_to_nearest(weight, torch.ones(k), "search", "integer")
    spec = LinearSpec(act_bits=act_bits, rank=0, rotation="none", scale_type="integer")
    return weight, QuantizedLinear(spec, pack_nibbles(rounded.codes), rounded.scales, row_scales=rounded.rows)


@pytest.mark.parametrize(("act_bits", "bound"), [(4, 0.2), (8, 0.13), (16, 0.12)])
def test_close_to_the_weights_it_was_made_of(act_bits: int, bound: float) -> None:
    weight, linear = quantized(act_bits)
    x = torch.randn(50, 192, generator=torch.Generator().manual_seed(1))
    assert relative_error(W4A4Linear(linear)(x), x.double() @ weight.double().T) < bound


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_verify_judges_it_by_the_same_codes(act_bits: int) -> None:
    _, linear = quantized(act_bits)
    x = make_input(21, 192, torch.float32)
    assert relative_error(W4A4Linear(linear)(x), evaluate_codes(x, linear, torch.float64)) < 1e-6


def test_state_dict_and_dtypes() -> None:
    module = W4A4Linear(quantized(4)[1])
    assert set(module.state_dict()) == {"qweight", "w_scales", "row_scales"}
    moved = copy.deepcopy(module).half().bfloat16()
    assert moved.row_scales is not None
    assert (moved.row_scales.dtype, moved.w_scales.dtype) == (torch.float32, torch.uint8)
    other = W4A4Linear(quantized(4)[1])
    other.row_scales = torch.zeros(72)
    other.load_state_dict(module.state_dict())
    assert_same(other(make_input(3, 192)), module(make_input(3, 192)), "y")
    assert "scales=integer" in repr(module)


def test_swap_takes_it() -> None:
    _, linear = quantized(8)
    model = nn.Sequential(nn.Linear(192, 72, bias=False))
    swap(model, {"0": linear})
    x = make_input(5, 192)
    assert_same(model(x), W4A4Linear(linear)(x), "y")
