"""Which recipes no other beats, and how the comparison reads."""

from __future__ import annotations

from typing import Any

import pytest

from omniw4.report import sweep


def row(
    label: str, bits: float | None, *ratios: float | None, activations: str = "4 bits", kl: float = 0.1
) -> dict[str, Any]:
    texts = [{"perplexity": {"ratio": r}, "kl": kl, "argmax_agreement": 0.9, "path": "reference"} for r in ratios]
    return {"label": label, "effective_bits": bits, "activations": activations, "seconds": 1.0, "texts": texts}


ROWS = [
    row("small", 4.0, 1.3, 1.3),
    row("good", 5.0, 1.1, 1.2),
    row("beaten", 5.0, 1.2, 1.2),
    row("same size", 4.5, 1.3, 1.3),
    row("wide", 5.0, 1.04, 1.05, activations="8 bits"),
]


def test_the_front_holds_what_nothing_beats() -> None:
    assert sweep.front(ROWS) == ["small", "good", "wide"]
    assert sweep.front([row("a", 4.0, 1.2), row("b", 4.0, 1.2)]) == ["a", "b"]
    assert sweep.front([row("a", None, 1.2)]) == []


def test_the_score_is_the_geometric_mean_and_kl_where_there_is_no_perplexity() -> None:
    assert sweep.score(row("a", 4.0, 1.2, 1.3)) == pytest.approx((1.2 * 1.3) ** 0.5)
    assert sweep.score(row("a", 4.0, None, None, kl=0.25)) == pytest.approx(0.25)


def test_pages() -> None:
    document = {
        "model": "model|name", "datasets": ["a.txt", "b.txt"], "windows": 2, "seq_len": 64,
        "recipes": ROWS, "front": sweep.front(ROWS),
    }  # fmt: skip
    text = sweep.to_markdown(document)
    assert "model\\|name" in text
    good = next(line for line in text.splitlines() if line.startswith("| good"))
    assert "1.100" in good
    assert "yes" in good
    assert "yes" not in next(line for line in text.splitlines() if line.startswith("| beaten"))
    page = sweep.to_html(document, with_plots=False)
    assert "<svg" not in page
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install 'omniw4[report]'")
    drawn = sweep.to_html(document)
    assert drawn.count("<svg") == 1
    assert "beaten" in drawn
