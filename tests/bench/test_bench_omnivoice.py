"""The benchmark of the real package, on a tiny model and a CPU: what it reports, not how fast that is."""

from __future__ import annotations

import json

import pytest
import torch

from omnivoice_fixture import require_omnivoice
from omniw4.bench.omnivoice import REQUESTS, Request, bench_omnivoice, round_to_nearest
from omniw4.bench.omnivoice_rows import Sample
from omniw4.errors import UsageError
from omniw4.tensors import LinearSpec

FEW = (Request("a", "Hello there.", 0.4), Request("b", "And once more.", 0.6))


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    require_omnivoice()


def test_the_table_is_one_short_request_and_nine_longer_ones() -> None:
    assert len(REQUESTS) == 10
    assert [r.seconds for r in REQUESTS] == sorted(r.seconds for r in REQUESTS)
    assert (REQUESTS[0].seconds, REQUESTS[-1].seconds) == (2.5, 12.0)
    assert REQUESTS[0].language == "en"


def test_engines_are_compared_in_one_run() -> None:
    seen = []
    rows = bench_omnivoice(
        "cpu", engines=("package", "reference", "fp16"), batches=(1, 2), requests=FEW, repetitions=2, num_step=2,
        tiny=True, on_progress=lambda p: seen.append(p.detail),
    )  # fmt: skip
    assert seen == ["package", "reference", "fp16"]
    found = {(row.engine, row.batch): row for row in rows}
    for engine in ("package", "reference"):
        single, batch = found[engine, 1], found[engine, 2]
        assert [s.name for s in single.samples] == ["a", "b"]
        assert [s.audio_seconds for s in batch.samples] == [1.0]
        assert all(
            0 < d < s
            for row in (single, batch)
            for x in row.samples
            for d, s in zip(x.decoding, x.seconds, strict=True)
        )
        assert single.checked
        assert batch.checked
        assert single.note == batch.note == ""
    package, ours = found["package", 1], found["reference", 1]
    assert package.speedup == 1.0
    assert ours.speedup == pytest.approx(package.mean_rtf / ours.mean_rtf)
    assert ours.start_up["backend"] == "reference"
    assert ours.step_ms == pytest.approx(sum(s.decoding_median for s in ours.samples) * 1e3 / 2 / 2)
    refused = found["fp16", 1]
    if not refused.samples:
        assert "fp16" in refused.note
    json.dumps([row.to_dict() for row in rows])


def test_a_sample_s_rtf_is_time_over_audio() -> None:
    assert Sample("x", 4.0, (1.0, 2.0, 9.0), (0.5, 1.0, 1.5)).rtf == 0.5


@pytest.mark.parametrize("spec", [LinearSpec(scale_type="integer"), LinearSpec(rank=0)], ids=["integer", "float16"])
def test_rounding_to_nearest_keeps_the_weight(spec: LinearSpec) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    error = round_to_nearest(weight, LinearSpec(**{**vars(spec), "rank": 0})).dequantize() - weight
    assert error.norm() < 0.2 * weight.norm()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="no engine 'w2a2'"):
        bench_omnivoice("cpu", engines=("package", "w2a2"), tiny=True)
