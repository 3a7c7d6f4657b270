"""The predicted times against times measured on an H200 (docs/roofline.md has them, and how they were taken)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omniw4 import roofline
from omniw4.roofline import cost

H200 = roofline.get("H200")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "roofline.md"
LINEAR = re.compile(r"^\| (\d+) \| (\d+) → (\d+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
QUANTIZED = re.compile(
    r"^\| (\d+) \| (\d+) → (\d+) \| ([\d.]+ / [\d.]+(?: \*)?) \| ([\d.]+ / [\d.]+(?: \*)?) \|", re.MULTILINE
)
STEP = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
ATTENTION = re.compile(r"^\| (\d+)×(\d+) \| ([\d.]+) \|", re.MULTILINE)


def measured_linears() -> list[tuple[int, int, int, float, float]]:
    """(M, K, N, FP16 µs, FP8 µs) of the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    return [(int(m), int(k), int(n), float(a), float(b)) for m, k, n, a, b in LINEAR.findall(text)]


def measured_quantized() -> list[tuple[int, int, int, str, str]]:
    """(M, K, N, W4A8, W4A4) of whole linears: measured / predicted."""
    found = QUANTIZED.findall(PAGE.read_text(encoding="utf-8"))
    return [(int(m), int(k), int(n), a, b) for m, k, n, a, b in found]


def measured_attention() -> list[tuple[int, int, float]]:
    return [(int(b), int(s), float(us)) for b, s, us in ATTENTION.findall(PAGE.read_text(encoding="utf-8"))]


def measured_steps() -> list[tuple[int, float, float, float, float]]:
    """(tokens, FP16 ms, FP8 ms, and both as the page predicts them)."""
    found = STEP.findall(PAGE.read_text(encoding="utf-8"))
    return [(int(tokens), float(a), float(b), float(c), float(d)) for tokens, a, b, c, d in found]


def test_the_page_has_the_measurements() -> None:
    assert len(measured_steps()) == 3
    assert len(measured_linears()) == 15
    assert len(measured_attention()) == 4
    assert len(measured_quantized()) == 42


@pytest.mark.parametrize(("m", "k", "n", "fp16", "fp8"), measured_linears())
def test_linears_are_within_a_factor_of_1_6(m: int, k: int, n: int, fp16: float, fp8: float) -> None:
    """The GEMM alone, as it was measured: the FP8 figures have no quantizer in them."""
    for width, wanted in (("fp16", fp16), ("fp8", fp8)):
        predicted = cost.linear(H200, width, m, n, k)[-1].predicted_us(H200)
        assert 1 / 1.6 < predicted / wanted < 1.6, f"{width} {m}×{n}×{k}: {predicted:.1f} µs against {wanted}"


@pytest.mark.parametrize(("m", "k", "n", "w4a8", "w4a4"), measured_quantized())
def test_quantized_linears_are_within_a_factor_of_1_6(m: int, k: int, n: int, w4a8: str, w4a4: str) -> None:
    for width, cell in (("w4a8", w4a8), ("w4a4", w4a4)):
        wanted, told = (float(part) for part in cell.split(" / "))
        predicted = sum(kernel.predicted_us(H200) for kernel in cost.linear(H200, width, m, n, k, 16))
        assert predicted == pytest.approx(told, abs=0.06), "the page prints what the program predicts"
        assert 1 / 1.6 < predicted / wanted < 1.6, f"{width} {m}×{n}×{k}"


@pytest.mark.parametrize(("batch", "length", "us"), measured_attention())
def test_attention_is_within_a_factor_of_1_6(batch: int, length: int, us: float) -> None:
    (kernel,) = cost.attention([length] * batch, 16, 8, 128, causal=False)
    assert 1 / 1.6 < kernel.predicted_us(H200) / us < 1.6


@pytest.mark.parametrize(("tokens", "fp16", "fp8", "told_fp16", "told_fp8"), measured_steps())
def test_whole_steps_are_within_a_factor_of_1_6(
    tokens: int, fp16: float, fp8: float, told_fp16: float, told_fp8: float
) -> None:
    """Of the fused engine, and the page prints what the program predicts."""
    result = roofline.compute(roofline.omnivoice(), H200, tokens, sequences=2, fused=True)
    for width, wanted, told in (("fp16", fp16, told_fp16), ("fp8", fp8, told_fp8)):
        predicted = (result.total_us(width) or 0) / 1000
        assert 1 / 1.6 < predicted / wanted < 1.6, f"{width} at {tokens}: {predicted:.2f} ms against {wanted}"
        assert predicted == pytest.approx(told, abs=0.005)


def test_the_products_and_the_attention_of_a_step() -> None:
    result = roofline.compute(roofline.omnivoice(), H200, 768, sequences=2, fused=True)
    assert result.total_us("fp16", kind="linear") == pytest.approx(1406, rel=0.6)
    assert result.total_us("fp16", kind="attention") == pytest.approx(284, rel=0.6)
    told = re.search(r"predicted are (\d+) and (\d+)", PAGE.read_text(encoding="utf-8"))
    assert told is not None
    predicted = [round(result.total_us("fp16", kind=kind) or 0) for kind in ("linear", "attention")]
    assert predicted == [*map(int, told.groups())]


def test_no_prediction_beats_the_bare_roofline() -> None:
    for gpu in roofline.known().values():
        for width in roofline.WIDTHS:
            if not cost.supported(gpu, width):
                continue
            for m in (1, 17, 256, 704, 5000):
                for kernel in cost.linear(gpu, width, m, 1536, 960, 16):
                    assert kernel.predicted_us(gpu) > kernel.ideal_us(gpu)
