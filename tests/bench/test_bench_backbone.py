"""The backbone's ways of running side by side, on a tiny one: what is compared, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from omniw4 import bench
from omniw4.bench import backbone
from omniw4.bench.environment import environment
from omniw4.bench.omnivoice import with_random_quantized
from omniw4.cli.bench import report
from omniw4.errors import UsageError
from omniw4.runtime.backends.w4 import Acts, PackedProjection
from omniw4.runtime.engine import Qwen3Engine
from omniw4.tensors import LinearSpec

CPU = torch.device("cpu")
TINY = {
    **backbone.SIZES,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def rows() -> list[bench.BackboneRow]:
    engines = ("hf-eager", "hf-graph", "fp16", "bf16", "fp8", "w4a4", "w4a8")
    return backbone.bench_backbone(
        CPU, torch.float32, engines=engines, tokens=(8, 12), sizes=TINY, warmup=0, repetitions=2
    )


def test_every_engine_is_checked_and_timed(rows: list[bench.BackboneRow]) -> None:
    assert [(row.engine, row.tokens) for row in rows][:4] == [
        ("hf-eager", 8), ("hf-eager", 12), ("hf-graph", 8), ("hf-graph", 12),
    ]  # fmt: skip
    assert all(row.checked and row.timing is not None for row in rows)
    for row in rows:
        if row.engine in backbone.BASELINES:
            assert (row.error, row.bucket, row.weight_bytes) == (None, row.tokens, None)
        else:
            assert row.error is not None
            assert row.limit is not None
            assert 0 < row.error <= row.limit
            assert (row.bucket, row.attention) == (128, "sdpa-loop")


def test_speedups_are_ratios_of_medians_at_the_same_tokens(rows: list[bench.BackboneRow]) -> None:
    found = {(row.engine, row.tokens): row for row in rows}
    eager, fused = found["hf-eager", 12], found["w4a4", 12]
    assert eager.timing is not None
    assert fused.timing is not None
    assert fused.speedups["hf-eager"] == pytest.approx(eager.timing.median / fused.timing.median)
    assert set(fused.speedups) == {row.engine for row in rows} - {"w4a4"}


def test_quantized_weights_take_less(rows: list[bench.BackboneRow]) -> None:
    held = {row.engine: row.weight_bytes or 0 for row in rows}
    assert held["fp16"] == 2 * 2 * (128 * (256 + 128 + 3 * 192))
    assert held["fp8"] < 0.53 * held["fp16"]
    assert held["w4a4"] < 0.7 * held["fp16"]  # of which the low-rank branch, of rank 16 in 128 features, is the most


def test_the_table_has_a_row_for_each(rows: list[bench.BackboneRow]) -> None:
    result = bench.BenchResult(environment(CPU, warmup=0, repetitions=2), "float32", "reference", backbone=rows)
    table = report(result)
    assert "× hf-eager" in table
    assert "× hf-compiled" not in table
    assert table.count("w4a8") == 2
    assert "attention of the engine: sdpa-loop" in table
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["backbone"][0]["timing"]["median_us"] > 0


def test_a_wrong_engine_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backbone.TOLERANCES, "fp16", 1e-12)
    (row,) = backbone.bench_backbone(
        CPU, torch.float32, engines=("fp16",), tokens=(8,), sizes=TINY, warmup=0, repetitions=1
    )
    assert (row.checked, row.timing) == (False, None)
    assert row.note.startswith("not timed: error")
    json.dumps(row.to_dict(), allow_nan=False)


def judged(sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> dict[str, bench.BackboneRow]:
    rows = backbone.bench_backbone(
        CPU, dtype, engines=("w4a4", "w4a8"), tokens=(64,), sizes=sizes, warmup=0, repetitions=1
    )
    return {row.engine: row for row in rows}


def test_quantized_engines_are_judged_by_their_distance_from_w16() -> None:
    """Codes that fall into the neighbour change the result as much as all quantizing does; the distance stays."""
    # weights large enough that layers do not vanish beside the residual stream, and differences grow
    deep: dict[str, int] = {**TINY, "num_hidden_layers": 28, "initializer_range": 0.05}  # type: ignore[dict-item]
    model = backbone.random_backbone(deep, CPU, torch.float16)
    source = with_random_quantized(model, LinearSpec(scale_type="integer"))
    w16, reference = (backbone._plain(source, [64], bits)[64] for bits in (16, 4))
    engine = Qwen3Engine.from_model(source, backend="w4a4", buckets=())
    found = engine(*backbone.packed_inputs(64, 128, CPU, torch.float16))
    assert backbone._error(found, reference) > 0.15

    rows = judged(deep, torch.float16)
    assert rows["w4a4"].error == pytest.approx(backbone._error(found, w16))
    assert rows["w4a4"].limit == pytest.approx(1.1 * backbone._error(reference, w16))
    assert rows["w4a8"].error == pytest.approx(rows["w4a8"].limit, rel=0.2)
    assert rows["w4a4"].error > 5 * (rows["w4a8"].error or 0)
    assert all(row.checked for row in rows.values())


def perturbed(self: PackedProjection, acts: Acts, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    """down_proj alone, by a tenth of its size."""
    y = gemm(self, acts, dtype, *rest)
    return y + 0.1 * y.std() * torch.randn_like(y) if self.linear.in_features == TINY["intermediate_size"] else y


def swapped_scales(self: PackedProjection, acts: Acts, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    linear = replace(self.linear, w_scales=self.linear.w_scales.flip(1))
    return gemm(replace(self, linear=linear), acts, dtype, *rest)


def scales_of_another_token(self: PackedProjection, acts: Acts, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    acts = replace(acts, token_scales=acts.token_scales.roll(1), a_scales=acts.a_scales.roll(1, 0))
    return gemm(self, acts, dtype, *rest)


def nan_in_one_place(self: PackedProjection, acts: Acts, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    y = gemm(self, acts, dtype, *rest)
    y[0, 0] = float("nan")
    return y


gemm = PackedProjection.gemm


@pytest.mark.parametrize("broken", [perturbed, swapped_scales, scales_of_another_token, nan_in_one_place])
def test_a_broken_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., torch.Tensor]) -> None:
    monkeypatch.setattr(PackedProjection, "gemm", broken)
    for row in judged(TINY).values():
        assert (row.checked, row.timing) == (False, None), row.engine
        assert row.note.startswith("not timed: error")
        assert (row.error is None) == (broken is nan_in_one_place)
        json.dumps(row.to_dict(), allow_nan=False)


def test_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no engine 'fp4'"):
        backbone.bench_backbone(CPU, torch.float32, engines=("fp4",))
    with pytest.raises(UsageError, match="7 tokens do not make 2 sequences"):
        backbone.bench_backbone(CPU, torch.float32, tokens=(7,))
    with pytest.raises(UsageError, match="--tokens wants numbers of tokens, found 'x'"):
        backbone.parse_tokens("128,x")
    assert backbone.parse_tokens("128, 704") == [128, 704]
