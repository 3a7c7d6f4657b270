"""Which recipes no other beats, and how the comparison reads."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import pytest

from omniw4.report import sweep, sweep_pages


def run(
    label: str, bits: float | None, *ratios: float | None, activations: str = "4 bits", kl: float = 0.1,
    calibration: int | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    texts = [{"perplexity": {"ratio": r}, "kl": kl, "argmax_agreement": 0.9, "path": "reference"} for r in ratios]
    return {
        "label": label, "effective_bits": bits, "activations": activations, "seconds": 1.0, "texts": texts,
        "fingerprint": {"stats": calibration}, **more,
    }  # fmt: skip


def document(runs: list[dict[str, Any]], baseline: str | None = None, **more: Any) -> dict[str, Any]:
    rows = sweep.rows(runs)
    baseline = baseline or rows[0]["label"]
    sweep.compare(rows, baseline)
    return {
        "model": "model|name", "datasets": ["a.txt", "b.txt"], "windows": 2, "seq_len": 64,
        "recipes": rows, "front": sweep.front(rows), "baseline": baseline, **more,
    }  # fmt: skip


def cells(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Label -> header -> cell; of headers that come twice the last."""
    table = sweep_pages.table(document)
    assert all(len(row) == len(table.header) for row in table.rows)
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


RUNS = [
    run("small", 4.0, 1.3, 1.3),
    run("good", 5.0, 1.1, 1.2),
    run("beaten", 5.0, 1.2, 1.2),
    run("same size", 4.5, 1.3, 1.3),
    run("wide", 5.0, 1.04, 1.05, activations="8 bits"),
]
SPREAD = [
    *(run("base", 5.0, ratio, 1.2, calibration=seed) for seed, ratio in enumerate((1.1, 1.2, 1.3))),
    *(run("close", 4.5, ratio, 1.2, calibration=seed) for seed, ratio in enumerate((1.2, 1.2, 1.2))),
    *(run("far", 4.0, ratio, 1.9, calibration=seed) for seed, ratio in enumerate((1.9, 1.9, 1.9))),
    run("free", 4.0, 2.5, 2.5),
]


def test_the_front_holds_what_nothing_beats() -> None:
    assert sweep.front(sweep.rows(RUNS)) == ["small", "good", "wide"]
    assert sweep.front(sweep.rows([run("a", 4.0, 1.2), run("b", 4.0, 1.2)])) == ["a", "b"]
    assert sweep.front(sweep.rows([run("a", None, 1.2)])) == []


def test_the_score_is_the_geometric_mean_and_kl_where_there_is_no_perplexity() -> None:
    assert sweep.score(run("a", 4.0, 1.2, 1.3)) == pytest.approx((1.2 * 1.3) ** 0.5)
    assert sweep.score(run("a", 4.0, None, None, kl=0.25)) == pytest.approx(0.25)


def test_runs_of_a_label_are_a_mean_and_a_spread() -> None:
    base, close, far, free = sweep.rows(SPREAD)
    scores = [math.sqrt(ratio * 1.2) for ratio in (1.1, 1.2, 1.3)]
    assert base["score"] == pytest.approx(sum(scores) / 3)
    assert base["std"]["score"] == pytest.approx(statistics.stdev(scores))
    assert base["texts"][0]["perplexity"]["ratio"] == pytest.approx(1.2)
    assert base["std"]["texts"][0]["perplexity"]["ratio"] == pytest.approx(0.1)
    assert base["runs"] == SPREAD[:3]
    assert close["std"]["score"] == 0
    assert (free["std"], free["score"]) == (None, pytest.approx(2.5))
    assert far["effective_bits"] == 4.0


def test_a_difference_counts_beyond_twice_the_larger_spread() -> None:
    rows = sweep.rows(SPREAD)
    sweep.compare(rows, "base")
    base, close, far, free = rows
    assert (base["difference"], base["beyond"]) == (None, None)
    assert close["difference"] == pytest.approx(close["score"] - base["score"])
    assert [row["beyond"] for row in (close, far, free)] == [False, True, True]  # free has no spread: the baseline's
    sweep.compare(rows, "free")
    assert base["difference"] == pytest.approx(base["score"] - 2.5)
    alone = sweep.rows(RUNS)
    sweep.compare(alone, "good")
    assert all(row["beyond"] is None for row in alone), "one calibration has no spread"
    sweep.compare(unjudged := sweep.rows([run("a", 4.0, None, kl=0.1), run("b", 4.0, None, kl=None)]), "a")  # type: ignore[arg-type]
    assert unjudged[1]["difference"] is None


def test_the_table_of_a_single_calibration() -> None:
    found = cells(document(RUNS))
    assert "calibrations" not in found["good"]
    assert "beyond the spread" not in found["good"]
    assert "ms a forward" not in found["good"]
    assert found["good"]["ratio, a.txt"] == "1.100"
    assert found["good"]["best of its size"] == "yes"
    assert found["beaten"]["best of its size"] == ""
    assert found["good"]["score − small"] == f"{math.sqrt(1.1 * 1.2) - 1.3:+.4f}"
    assert found["small"]["score − small"] == ""


def test_the_table_of_several_calibrations() -> None:
    found = cells(document(SPREAD))
    assert found["base"]["ratio, a.txt"] == "1.200 ± 0.100"
    assert found["free"]["ratio, a.txt"] == "2.500"
    assert [row["calibrations"] for row in found.values()] == ["3", "3", "3", "none"]
    assert [row["beyond the spread"] for row in found.values()] == ["", "no", "yes", "yes"]


def test_the_table_of_prompts() -> None:
    runs = [run("a", 4.0, None, kl=0.5), run("b", 5.0, None, kl=0.25)]
    for made in runs:
        made["texts"][0]["match"] = 0.75
    about = {"datasets": ["said.jsonl"], "prompts": {"count": 6, "num_step": 16}}
    found = cells(document(runs, **about))
    assert list(found["a"]) == [
        "recipe", "activations", "bits a weight", "step agreement", "final match", "KL", "quantize s", "score − a",
        "best of its size",
    ]  # fmt: skip
    assert (found["b"]["final match"], found["b"]["KL"], found["b"]["score − a"]) == ("75.00%", "0.2500", "-0.2500")
    assert "6 prompts decoded in 16 steps" in sweep_pages.to_markdown(document(runs, **about))


def test_the_speed_has_a_column_where_some_recipe_has_one() -> None:
    found = cells(document([run("a", 4.0, 1.2, 1.2, backbone_ms=1.25), run("b", 4.0, 1.2, 1.2)]))
    assert [row["ms a forward"] for row in found.values()] == ["1.250", "–"]


def test_pages() -> None:
    about = document(RUNS)
    text = sweep_pages.to_markdown(about)
    assert "model\\|name" in text
    good = next(line for line in text.splitlines() if line.startswith("| good"))
    assert "1.100" in good
    assert "yes" in good
    assert "yes" not in next(line for line in text.splitlines() if line.startswith("| beaten"))
    page = sweep_pages.to_html(about, with_plots=False)
    assert "<svg" not in page
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install 'omniw4[report]'")
    drawn = sweep_pages.to_html(about)
    assert drawn.count("<svg") == 1
    assert "beaten" in drawn
    timed = sweep_pages.to_html(document([run("a", 4.0, 1.2, backbone_ms=1.25)]))
    assert timed.count("<svg") == 2
    names = re.findall(r'\bid="([^"]+)"', timed)
    assert len(names) == len(set(names))
