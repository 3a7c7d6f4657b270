"""The walk: order, sharing, resumption with the same bytes, and errors that name the linear."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from quantize_problems import Shape, inputs, stats_of, weights

from omniw4 import config
from omniw4.config import Recipe
from omniw4.errors import ModelError, StatsError
from omniw4.quantize import layer as layer_module
from omniw4.quantize.pipeline import Progress, WeightSource, quantize_model
from omniw4.quantize.plan import _LIBRARIES as LIBRARIES
from omniw4.quantize.plan import Plan, make_plan
from omniw4.tensors import LayerReport, LinearStats, QuantizedLinear

SHAPES = {
    "b.0.q": Shape(64, 128, bias=True),
    "b.0.k": Shape(16, 128),
    "b.0.v": Shape(16, 128),
    "b.0.o": Shape(128, 64),
    "b.1.q": Shape(64, 128),
}


CHANGES = {"gptq": {"order": "activation"}, "smooth": {"strength": "search"}}
RECIPES = {"ordered and searched": ("default", {"recipe": CHANGES})}


class Run:
    """Everything a call of quantize_model needs, and what it saved."""

    def __init__(self, name: str = "seed") -> None:
        self.recipe: Recipe = config.load(*RECIPES.get(name, (name,))).recipe
        self.plan: Plan = make_plan(SHAPES, self.recipe, SHAPES)
        self.saved: dict[str, QuantizedLinear] = {}
        self.reports: dict[str, LayerReport] = {}
        self.loads: list[str] = []
        self.progress: list[Progress] = []
        self.stop_after: int | None = None

    def weights(self) -> dict[str, WeightSource]:
        def source(path: str, seed: int) -> WeightSource:
            def load() -> tuple[torch.Tensor, torch.Tensor | None]:
                self.loads.append(path)
                s = SHAPES[path]
                bias = torch.ones(s.out_features) if s.bias else None
                return weights(s.out_features, s.in_features, seed=seed), bias

            return load

        return {path: source(path, seed) for seed, path in enumerate(SHAPES)}

    def save(self, path: str, quantized: QuantizedLinear, report: LayerReport) -> None:
        if self.stop_after is not None and len(self.saved) >= self.stop_after:
            raise KeyboardInterrupt
        self.saved[path] = quantized
        self.reports[path] = report

    def stats_for(self, path: str) -> LinearStats | None:
        return stats_of(inputs(300, SHAPES[path].in_features, seed=len(group_of(path))))

    def __call__(self, done: Collection[str] = frozenset()) -> list[LayerReport]:
        return quantize_model(
            self.weights(),
            self.plan,
            self.recipe,
            self.stats_for,
            self.save,
            done,
            self.progress.append,
            group_of=group_of,
        )


def group_of(path: str) -> str:
    block, name = path.rsplit(".", 1)
    return f"{block}.{'qkv' if name in 'qkv' else name}"


def test_every_linear_is_saved_once_in_order() -> None:
    run = Run()
    reports = run()
    assert list(run.saved) == list(SHAPES)
    assert run.loads == list(SHAPES)
    assert [report.path for report in reports] == list(SHAPES)
    assert [(p.done, p.total) for p in run.progress] == [(i, 5) for i in range(1, 6)]
    assert run.saved["b.0.q"].bias is not None
    assert run.saved["b.0.k"].bias is None


def test_linears_of_one_input_share_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = layer_module.factorise
    monkeypatch.setattr(layer_module, "factorise", lambda h, damp: calls.append(h.shape[-1]) or original(h, damp))
    Run()()
    assert calls == [128, 64, 128]


@pytest.mark.parametrize("name", ["seed", "default", "rtn", *RECIPES])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3, 4])
def test_a_run_that_was_broken_off_gives_the_same_bytes(name: str, stop_after: int) -> None:
    """Also between two linears that go through GPTQ together."""
    whole = Run(name)
    whole()
    broken = Run(name)
    broken.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        broken()
    resumed = Run(name)
    resumed(done=set(broken.saved))
    assert not broken.saved.keys() & resumed.saved.keys()
    saved = {**broken.saved, **resumed.saved}
    assert saved.keys() == whole.saved.keys()
    for path, quantized in whole.saved.items():
        for tensor_name, tensor in quantized.tensors().items():
            assert torch.equal(tensor, saved[path].tensors()[tensor_name]), f"{path}.{tensor_name}"
    reports = {**broken.reports, **resumed.reports}
    for path, report in whole.reports.items():
        assert {**report.to_dict(), "seconds": 0} == {**reports[path].to_dict(), "seconds": 0}
    assert resumed.progress[-1].done == 5


def test_nothing_is_loaded_when_all_is_done() -> None:
    run = Run()
    assert run(done=set(SHAPES)) == []
    assert run.loads == []


def test_a_data_free_recipe_asks_for_no_statistics() -> None:
    run = Run("rtn")
    run.stats_for = lambda path: pytest.fail(f"asked for statistics of {path}")  # type: ignore[method-assign]
    run()
    assert {report.method for report in run.reports.values()} == {"rtn"}


def test_missing_statistics_are_named() -> None:
    run = Run()
    run.stats_for = lambda path: None  # type: ignore[method-assign]
    with pytest.raises(StatsError, match=r"b\.0\.q"):
        run()


def test_weights_other_than_planned_are_named() -> None:
    run = Run()
    run.weights = lambda: {}  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"b\.0\.q.*5 of the plan"):
        run()
    run = Run()
    wrong: dict[str, WeightSource] = dict.fromkeys(SHAPES, lambda: (torch.zeros(3, 128), None))
    run.weights = lambda: wrong  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"b\.0\.q\.weight has shape \(3, 128\)"):
        run()


def test_batches_hold_equal_groups_within_the_limit() -> None:
    plan = Run().plan
    groups = plan.input_groups(group_of)
    assert plan.batches(group_of, 0) == [[group] for group in groups]
    same = {name: Shape(64, 128) for name in ("a", "b", "c", "d", "e")}
    many = make_plan(same, config.load("seed").recipe, same)
    one = many.peak_bytes()
    assert [[g[0].path for g in batch] for batch in many.batches(None, 2 * one)] == [["a", "b"], ["c", "d"], ["e"]]
    assert many.peak_bytes(None, 2 * one) == 2 * one - LIBRARIES, "buffers of libraries count once"
    assert len(many.batches(None, 100 * one)) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_process_makes_of_a_linear_what_any_other_does(name: str) -> None:
    whole = Run(name)
    whole()
    shared = Run(name)
    for rank in range(2):
        quantize_model(
            shared.weights(),
            shared.plan,
            shared.recipe,
            shared.stats_for,
            shared.save,
            group_of=group_of,
            part=(rank, 2),
        )
    assert shared.saved.keys() == whole.saved.keys()
    for path, quantized in whole.saved.items():
        for tensor_name, tensor in quantized.tensors().items():
            assert torch.equal(tensor, shared.saved[path].tensors()[tensor_name]), f"{path}.{tensor_name}"


@pytest.mark.parametrize("name", ["default", *RECIPES])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_batches_are_made_whole_so_that_a_resumed_run_gives_the_same_bytes(
    stop_after: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniw4.quantize.pipeline.batch_limit", lambda device: 2**40)
    whole = Run(name)
    whole()
    assert set(whole.saved) == set(SHAPES)
    broken = Run(name)
    broken.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        broken()
    resumed = Run(name)
    resumed(done=set(broken.saved))
    saved = {**broken.saved, **resumed.saved}
    for path, quantized in whole.saved.items():
        for tensor_name, tensor in quantized.tensors().items():
            assert torch.equal(tensor, saved[path].tensors()[tensor_name]), f"{path}.{tensor_name}"


def test_side_by_side_gives_the_same_bytes_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs at once, each on one core; what was set is as before, whatever ends the run."""
    monkeypatch.setattr("omniw4.quantize.pipeline.side_by_side", lambda *_: 1)
    alone = Run("default")
    alone()
    monkeypatch.setattr("omniw4.quantize.pipeline.side_by_side", lambda *_: 2)
    beside, threads = Run("default"), torch.get_num_threads()
    beside()
    assert list(beside.saved) == list(alone.saved)
    for path, wanted in alone.saved.items():
        for name, tensor in wanted.tensors().items():
            assert torch.equal(beside.saved[path].tensors()[name], tensor), f"{path}.{name}"
    stopped = Run("default")
    stopped.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(stopped.saved) == list(alone.saved)[:1]
    broken = Run("default")
    monkeypatch.setattr(broken, "stats_for", lambda path: None)
    with pytest.raises(StatsError, match=r"b\.0\.q"):
        broken()
    assert torch.get_num_threads() == threads
