"""quantization_config and the specs it stands for; the golden linear read through the format."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from raw_checkpoint import GOLDEN, PATH, PLAIN, raw_checkpoint, report
from safetensors.torch import load_file

from omniw4 import int4
from omniw4.checkpoint import Checkpoint, parse_quantization_config, quantization_config
from omniw4.checkpoint.reader import dump_report, parse_report
from omniw4.checkpoint.schema import SETTINGS, natural_order
from omniw4.errors import MalformedJsonError
from omniw4.tensors import LayerReport, LinearSpec


def test_every_setting_of_a_linear_is_stored() -> None:
    assert {field.name for field in dataclasses.fields(LinearSpec)} == set(SETTINGS)


def test_every_figure_of_a_report_is_stored() -> None:
    stored = dump_report(LayerReport("p", 1, 64, "rtn", 0.1, 1.0, 0.0, 0.0, smooth_strength=0.4))
    named = {field.name for field in dataclasses.fields(LayerReport)}
    assert named - set(stored) == {"path", "seconds"}
    assert set(stored) == {*report(1, 64), "smooth_strength"}
    assert dump_report(parse_report("p", json.loads(json.dumps(stored)))).keys() == stored.keys()


def test_a_smoothing_that_was_not_searched_is_stored_as_by_versions_that_knew_no_search() -> None:
    old = report(1, 64)
    assert parse_report("p", old).smooth_strength is None
    assert dump_report(parse_report("p", old)).keys() == old.keys()
    assert parse_report("p", {**old, "smooth_strength": 0.4}).smooth_strength == 0.4
    for wrong in (None, "0.4", True):
        with pytest.raises(MalformedJsonError, match="smooth_strength"):
            parse_report("p", {**old, "smooth_strength": wrong})


SPECS = {
    "layers.10.q": LinearSpec(rank=16),
    "layers.2.q": LinearSpec(rank=16),
    "layers.2.down": LinearSpec(rank=0, act_bits=8, rotation="none", smooth=True, act_clip=0.9),
    "layers.3.down": LinearSpec(rank=256, act_bits=16, scale_type="integer"),
}


def test_specs_survive_the_config() -> None:
    stored = json.loads(json.dumps(quantization_config(SPECS, skipped=["lm_head"])))
    assert parse_quantization_config(stored) == SPECS
    assert list(stored["modules"]) == ["layers.2.down", "layers.2.q", "layers.3.down", "layers.10.q", "lm_head"]
    assert stored["modules"]["layers.10.q"] == {}
    assert stored["modules"]["lm_head"] == "skip"
    assert stored["rank"] == 16


def test_config_of_nothing() -> None:
    assert parse_quantization_config(quantization_config({})) == {}


@pytest.mark.parametrize("same", [0, 1, 2])
def test_order_of_the_linears_does_not_show(same: int) -> None:
    turned = dict(list(SPECS.items())[same:] + list(SPECS.items())[:same])
    assert json.dumps(quantization_config(turned)) == json.dumps(quantization_config(SPECS))


def test_natural_order() -> None:
    names = ["layers.10.b", "layers.9.b", "layers.9.a", "embed", "1", "layers.9", "10", "2"]
    assert sorted(names, key=natural_order) == [
        *("1", "2", "10", "embed", "layers.9", "layers.9.a", "layers.9.b", "layers.10.b"),
    ]


def test_golden_linear_through_the_format(tmp_path: Path) -> None:
    golden = load_file(GOLDEN)
    checkpoint = Checkpoint.open(raw_checkpoint().write(tmp_path))
    assert checkpoint.specs[PLAIN] == replace(checkpoint.specs[PATH], rank=0, smooth=False, act_bits=8)
    linear = checkpoint.linear(PATH)
    assert torch.equal(int4.unpack_nibbles(linear.qweight), golden["codes"])
    for name, tensor in linear.tensors().items():
        assert torch.equal(tensor, golden[name]), name
    weight = int4.dequantize(int4.unpack_nibbles(linear.qweight), linear.w_scales)
    assert torch.equal(weight, golden["weight"])
    assert checkpoint.linears[PATH].effective_bits == pytest.approx(linear.effective_bits())


def test_integer_scales_through_the_format(tmp_path: Path) -> None:
    raw = raw_checkpoint()
    raw.quantization["modules"][PLAIN]["scale_type"] = "integer"
    raw.tensors[f"{PLAIN}.qweight"] = ("U8", [8, 64], bytes(range(256)) * 2)
    raw.tensors[f"{PLAIN}.w_scales"] = ("U8", [8, 2], bytes(range(16)))
    raw.tensors[f"{PLAIN}.row_scales"] = ("F32", [8], torch.arange(8.0).numpy().tobytes())
    checkpoint = Checkpoint.open(raw.write(tmp_path))
    linear = checkpoint.linear(PLAIN)
    assert linear.spec == LinearSpec(rank=0, act_bits=8, act_clip=0.95, scale_type="integer")
    codes = int4.unpack_nibbles(linear.qweight).double()
    scales = torch.arange(16.0, dtype=torch.float64).reshape(8, 2).repeat_interleave(64, 1)
    wanted = torch.arange(8.0, dtype=torch.float64)[:, None] * scales * codes
    assert torch.equal(linear.dequantize_codes(torch.float64), wanted)
    assert checkpoint.linears[PLAIN].effective_bits == linear.effective_bits() == 4 + 8 / 64 + 32 / 128
    assert checkpoint.specs[PATH].scale_type == "float16"
