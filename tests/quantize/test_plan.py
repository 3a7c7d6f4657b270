"""The plan: patterns, overrides, sizes, and everything that is wrong told at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quantize_problems import Shape, inputs, stats_of, weights

from omniw4 import config
from omniw4.config import Recipe
from omniw4.errors import PatternError, PlanError
from omniw4.quantize.layer import quantize_layer
from omniw4.quantize.plan import Plan, make_plan


def model(k: int = 128) -> dict[str, Shape]:
    shapes = {}
    for layer in range(2):
        for name, n in (("q_proj", k), ("k_proj", 32), ("o_proj", k)):
            shapes[f"layers.{layer}.{name}"] = Shape(n, k, bias=name == "q_proj")
    return {**shapes, "lm_head": Shape(1000, k)}


def recipe_of(**values: Any) -> Recipe:
    return config.load("default", {"recipe": values}).recipe


def plan_of(shapes: dict[str, Shape], **values: Any) -> Plan:
    return make_plan(shapes, recipe_of(**values), [path for path in shapes if path.startswith("layers")])


def test_every_linear_is_in_the_plan_with_what_happens_to_it() -> None:
    plan = plan_of(model(), skip=["*.o_proj"])
    assert [entry.path for entry in plan.entries] == list(model())
    assert [entry.path for entry in plan.quantized] == [
        f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "k_proj")
    ]
    reasons = {entry.path: entry.skip_reason for entry in plan.skipped}
    assert reasons == {
        "layers.0.o_proj": "skipped by '*.o_proj'",
        "layers.1.o_proj": "skipped by '*.o_proj'",
        "lm_head": "outside the repeated blocks",
    }
    assert plan.entries[0].bias
    assert plan.needs_stats


def test_include_reaches_outside_the_blocks() -> None:
    plan = plan_of(model(), include=["lm_head", r"re:layers\.0\..*"])
    assert {entry.path for entry in plan.quantized} == {"lm_head", *(f"layers.0.{n}_proj" for n in "qko")}


def test_overrides_in_order() -> None:
    overrides = [
        {"pattern": "*.q_proj", "act_bits": 8, "rank": 32},
        {"pattern": "layers.1.*", "act_bits": 16, "rotation": "none"},
    ]
    specs = {entry.path: entry.spec for entry in plan_of(model(), overrides=overrides).quantized}
    found = {path: (s.act_bits, s.rank, s.rotation) for path, s in specs.items() if s and path.endswith("q_proj")}
    assert found == {"layers.0.q_proj": (8, 32, "hadamard64"), "layers.1.q_proj": (16, 32, "none")}


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"include": ["nothing.*"]}, "--include"),
        ({"skip": ["*.q_prj"]}, "--skip"),
        ({"overrides": [{"pattern": "*.v_proj", "rank": 8}]}, "--override"),
        ({"skip": ["*.q_proj"], "overrides": [{"pattern": "*.q_proj", "rank": 8}]}, "--override"),
        ({"skip": ["re:(("]}, "regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(PatternError, match=flag):
        plan_of(model(), **values)


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(PlanError, match="none of the model's 7 linears"):
        plan_of(model(), skip=["layers.*"])


def test_a_width_that_64_does_not_divide_is_found_for_all_linears_at_once() -> None:
    shapes = {**model(), "layers.2.a": Shape(64, 1000), "layers.2.b": Shape(64, 96)}
    with pytest.raises(PlanError) as caught:
        plan_of(shapes)
    for part in ("group_size 64", "2 linears", "layers.2.a (1000)", "layers.2.b (96)"):
        assert part in caught.value.message
    assert "--skip '*.a' --skip '*.b'" in caught.value.hint
    assert "layers.2.a" not in {e.path for e in plan_of(shapes, skip=["layers.2.*"]).quantized}


def test_group_128_on_width_576_is_refused_with_the_sizes_that_fit() -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(model(576), group_size=128)
    for part in ("group_size 128", "6 linears", "layers.0.q_proj (576)", "64"):
        assert part in caught.value.message
    assert "recipe.group_size" in caught.value.hint


@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_a_group_size_that_divides_but_is_not_supported_is_refused(group_size: int) -> None:
    with pytest.raises(PlanError, match=f"group_size {group_size} is not supported"):
        plan_of(model(128), group_size=group_size)


@pytest.mark.parametrize(
    "values", [{}, {"lowrank": {"rank": 0}}, {"lowrank": {"rank": 40}, "smooth": {"strength": 0.5}}]
)
def test_sizes_are_those_of_the_tensors_that_will_be_stored(values: dict[str, Any]) -> None:
    plan = make_plan({"a": Shape(48, 128)}, recipe_of(**values), ["a"], source_bytes_per_weight=4)
    spec = plan.quantized[0].spec
    assert spec is not None
    quantized, _ = quantize_layer(weights(48, 128), None, stats_of(inputs(200, 128)), spec, recipe_of(**values))
    stored = sum(t.numel() * t.element_size() for t in quantized.tensors().values())
    assert plan.bytes_after() == stored
    assert plan.bytes_before() == 48 * 128 * 4
    assert plan.effective_bits() == pytest.approx(quantized.effective_bits())


def test_groups_share_input_rotation_and_smoothing() -> None:
    plan = plan_of(model(), overrides=[{"pattern": "layers.1.k_proj", "rotation": "none"}])

    def group_of(path: str) -> str:
        return path.rsplit(".", 1)[0] + (".o" if path.endswith("o_proj") else ".qk")

    groups = [[entry.path for entry in group] for group in plan.input_groups(group_of)]
    assert groups == [
        ["layers.0.q_proj", "layers.0.k_proj"],
        ["layers.0.o_proj"],
        ["layers.1.q_proj"],
        ["layers.1.k_proj"],
        ["layers.1.o_proj"],
    ]
    assert len(plan.input_groups()) == 6
    assert plan.peak_bytes(group_of) > plan.peak_bytes()


def test_a_data_free_recipe_needs_no_statistics() -> None:
    plan = make_plan(model(), config.load("rtn").recipe, ["layers.0.q_proj"])
    assert not plan.needs_stats


def test_the_plan_is_plain_json() -> None:
    told = plan_of(model()).to_dict()
    assert json.loads(json.dumps(told)) == told
    assert len(told["linears"]) == 7
