"""``bench --what linear``: refused without its GPU; ratios, shares and tables from given times."""

from __future__ import annotations

import pytest
import torch

from omniw4.bench import Ceiling, Timing
from omniw4.bench.contest import WEIGHTS, Weight, contest
from omniw4.bench.linear_rows import Contest, QuantizerRow, summary
from omniw4.bench.run import run
from omniw4.cli.linear_report import COLUMNS, linear_tables
from omniw4.errors import UsageError
from omniw4.ops import gemm_wgmma_s8


def row(**us: float) -> Contest:
    times = {name.replace("_", " "): Timing((value, value)) for name, value in us.items()}
    return Contest("qkv", 16, 4096, 1024, times=times)


def test_refused_without_its_gpu() -> None:
    with pytest.raises(UsageError, match=r"compute capability 9.0"):
        run(what=["linear"], device="cpu")


def test_the_weights_are_those_of_the_models() -> None:
    sizes = {w.name: (w.n, w.k) for w in WEIGHTS}
    assert sizes["qkv"] == (4096, 1024)
    assert sizes["gate_up"] == (6144, 1024)
    assert sizes["down"] == (1024, 3072)
    assert all(part % 64 == 0 for w in WEIGHTS for part in w.parts), "segments begin at multiples of 64"


def test_ratios_and_summary() -> None:
    rows = [row(w4a4=5, fp16=10, fp8_quantized=8, w4a4_rank_0=4), row(w4a4=4, fp16=4, fp8_quantized=8, w4a4_rank_0=4)]
    assert rows[0].ratio("w4a4", "fp16") == 2
    assert rows[0].ratio("w4a4", "int8") is None
    assert rows[0].tops("w4a4") == pytest.approx(2 * 16 * 4096 * 1024 / 5 * 1e-6)
    figures = summary(rows)
    assert figures["w4a4 over fp16, geometric mean"] == pytest.approx(2**0.5)
    assert figures["w4a4 over fp16, least"] == 1
    assert "w4a8 over fp16, least" not in figures
    assert figures["share of the low-rank branch, median"] == pytest.approx(1 - 1 / 1.125)
    assert summary([]) == {}


def test_roofline_counts_bytes_where_they_bind() -> None:
    case = row(w4a4_product=10)
    assert case.roofline("w4a4 product") is None
    case.ceiling = Ceiling(tops=1000, gbs=1000, source="given")
    moved = 4096 * 1024 * 33 / 64 + 16 * 1024 + 2 * 16 * 4096
    assert case.roofline("w4a4 product") == pytest.approx(moved / 1000 * 1e-3 / 10)


def test_tables_show_every_contestant_and_what_was_wrong() -> None:
    from omniw4.bench.environment import environment
    from omniw4.bench.result import BenchResult

    result = BenchResult(environment(torch.device("cpu"), warmup=0, repetitions=1), "float16", "wgmma_s8")
    good, wrong = row(**{name.replace(" ", "_"): 5.0 for name in COLUMNS}), row()
    wrong.checked, wrong.notes = False, ["w4a4: error 1 against FP64 is above 0"]
    result.linear = [good, wrong]
    result.quantizer = [QuantizerRow(704, 1024, Timing((2.0,)), Timing((3.0,)), Timing((1.0,)))]
    text = "\n".join(linear_tables(result))
    assert "WRONG" in text
    assert "w4a4: error 1" in text
    assert "50%" in text
    assert not result.passed
    document = result.to_dict()
    assert document["linear"][0]["times"]["fp16"]["median_us"] == 5
    assert document["quantizer"][0]["share_of_copy"] == 0.5


@pytest.mark.gpu
def test_a_small_contest() -> None:
    device = torch.device("cuda", 0)
    if not gemm_wgmma_s8.runs(device, 4):
        pytest.skip("needs sm_90 and kernels compiled for 90a")
    rows = contest(device, weights=[Weight("two", (128, 192), 256)], tokens=(1, 40), warmup=1, repetitions=2)
    assert all(r.checked for r in rows), [r.notes for r in rows]
    assert set(rows[0].times) >= set(COLUMNS)
