"""Rows of ops: checked before timed, honest arithmetic, and no roofline that was not measured."""

import pytest
import torch

from omniw4 import ops
from omniw4.bench import cases
from omniw4.bench.cases import Setting
from omniw4.bench.ceilings import measure_ceiling, roofline_share
from omniw4.bench.linear import BACKBONE, bench_ops, default_shapes, parse_shapes
from omniw4.bench.result import Ceiling, OpRow
from omniw4.bench.timing import Timing
from omniw4.errors import UsageError
from omniw4.tensors import LinearSpec

CPU = torch.device("cpu")


def rows_of(shapes, dtype=torch.float32, **spec):
    return bench_ops(shapes, Setting(CPU, dtype, LinearSpec(**spec)), path="reference", warmup=0, repetitions=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [{}, {"rank": 0}, {"act_bits": 8}, {"act_bits": 16, "rotation": "none"}])
def test_every_op_passes_its_check_and_is_timed(dtype, spec):
    rows = rows_of([(33, 24, 128)], dtype, **spec)
    linear = ["quantize_lora_down", "gemm_lora_up", "linear"]
    assert [row.op for row in rows] == [*linear, "inv_rms", "rms_norm", "swiglu", "quantize_fp8", "qknorm_rope"]
    for row in rows:
        assert row.checked, (row.op, row.error, row.tolerance)
        assert len(row.timing.samples) == 2
        assert row.roofline is None
    assert [row.baseline is not None for row in rows] == [False, True, True, *5 * [False]]


def test_ops_without_a_weight_are_not_repeated():
    rows = rows_of([(1, 8, 64), (1, 16, 64), (1, 8, 128), (2, 8, 64)])
    assert [(row.m, row.k) for row in rows if row.op == "inv_rms"] == [(1, 64), (1, 128), (2, 64)]
    assert [row.m for row in rows if row.op == "qknorm_rope"] == [1, 2]
    assert sum(row.op == "linear" for row in rows) == 4


@pytest.mark.parametrize("fault", [lambda y: y * 1.02, lambda y: y.roll(1, 0), lambda y: y * float("nan")])
def test_a_wrong_output_is_reported_and_not_timed(monkeypatch, fault):
    original = ops.gemm_lora_up
    monkeypatch.setattr(cases.ops, "gemm_lora_up", lambda *args: fault(original(*args)))
    rows = {row.op: row for row in rows_of([(17, 24, 128)], torch.float16)}
    for name in ("gemm_lora_up", "linear"):
        assert not rows[name].checked
        assert rows[name].timing is None
        assert rows[name].speedup is None
        assert "not timed" in rows[name].note
    assert rows["inv_rms"].checked


def test_rates_are_work_over_the_median():
    timing = Timing((10.0, 20.0, 90.0))
    row = OpRow("linear", 4, 8, 64, 0, 4, ops=4096, bytes=1024, path="reference", checked=True, timing=timing,
                baseline=Timing((10.0,)))  # fmt: skip
    assert row.tops == pytest.approx(4096 / 20e-6 / 1e12)
    assert row.gbs == pytest.approx(1024 / 20e-6 / 1e9)
    assert row.intensity == 4.0
    assert row.speedup == 0.5
    assert row.to_dict()["vs_fp16"] == 0.5
    assert row.to_dict()["timing"]["samples_us"] == [10.0, 20.0, 90.0]


def test_roofline_is_the_slower_of_work_and_traffic():
    ceiling = Ceiling(tops=100.0, gbs=1000.0, source="test")
    assert roofline_share(ceiling, ops=10**9, bytes_moved=1, median_us=20.0) == pytest.approx(0.5)
    assert roofline_share(ceiling, ops=1, bytes_moved=10**6, median_us=4.0) == pytest.approx(0.25)
    assert roofline_share(None, 1, 1, 1.0) is None
    assert measure_ceiling("cpu") is None


def test_work_and_traffic_of_a_linear():
    """M=2, N=8, K=64, R=16 in float16: every byte counted by hand."""
    rows = {row.op: row for row in rows_of([(2, 8, 64)], torch.float16)}
    acts, weight = 2 * 32 + 2 * 2, 8 * 32 + 8 * 2 + 8 * 16 * 2
    assert rows["gemm_lora_up"].ops == rows["linear"].ops == 2 * 2 * 8 * 64
    assert rows["gemm_lora_up"].bytes == acts + weight + 2 * 16 * 4 + 2 * 8 * 2
    assert rows["quantize_lora_down"].bytes == 2 * 64 * 2 + acts + 64 * 16 * 2 + 2 * 16 * 4
    assert rows["linear"].bytes == 2 * 64 * 2 + weight + 64 * 16 * 2 + 2 * 8 * 2
    assert rows["inv_rms"].bytes == 2 * 64 * 2 + 2 * 4


def test_shapes_are_parsed():
    assert parse_shapes("16x2048x1024, 1×8×64") == [(16, 2048, 1024), (1, 8, 64)]


@pytest.mark.parametrize("text", ["", "16x32", "16x32x64x1", "0x8x64", "ax8x64", "1x8x64,", "-1x8x64"])
def test_shapes_of_another_form_are_refused(text):
    with pytest.raises(UsageError, match="MxNxK"):
        parse_shapes(text)


def test_a_width_off_the_group_is_refused():
    with pytest.raises(UsageError, match="multiple of 64, found 100"):
        parse_shapes("1x8x100")


def test_default_shapes_are_distinct_and_cover_the_backbone():
    shapes = default_shapes([*BACKBONE, *BACKBONE], on_gpu=True)
    assert len(shapes) == len(set(shapes))
    assert {(n, k) for _, n, k in shapes} == set(BACKBONE)
    assert {m for m, _, _ in shapes} >= {1, 16, 2048}
