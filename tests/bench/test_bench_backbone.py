"""The backbone's ways of running side by side, on a tiny one: what is compared, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from omniw4 import bench
from omniw4.bench import backbone
from omniw4.bench.environment import environment
from omniw4.cli.bench import report
from omniw4.errors import UsageError

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
            assert 0 < row.error < backbone.TOLERANCES[row.engine]
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


def test_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no engine 'fp4'"):
        backbone.bench_backbone(CPU, torch.float32, engines=("fp4",))
    with pytest.raises(UsageError, match="7 tokens do not make 2 sequences"):
        backbone.bench_backbone(CPU, torch.float32, tokens=(7,))
    with pytest.raises(UsageError, match="--tokens wants numbers of tokens, found 'x'"):
        backbone.parse_tokens("128,x")
    assert backbone.parse_tokens("128, 704") == [128, 704]
