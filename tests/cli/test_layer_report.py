"""What `omniw4 quantize` says about its layers."""

from __future__ import annotations

import json
import math

import pytest

from omniw4.checkpoint.inspect import same_warnings
from omniw4.cli import layer_report
from omniw4.cli.output import Output
from omniw4.tensors import LayerReport


def report(path: str, sqnr: float = 20.0, warnings: list[str] | None = None) -> LayerReport:
    return LayerReport(
        path=path,
        out_features=8,
        in_features=64,
        method="gptq",
        relative_error=10 ** (-sqnr / 10),
        sqnr_db=sqnr,
        damp=0.01,
        rank_energy=0.4,
        rounds=[0.01],
        seconds=1.0,
        warnings=warnings or [],
    )


def test_the_noisiest_are_named_and_the_rest_counted(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [report(f"layers.{i}", sqnr=i) for i in range(20)]
    layer_report.warn(reports, Output())
    said = capsys.readouterr().err
    assert "warning: layers.0 has sqnr 0.0 dB (below 12 dB)" in said
    assert "--override 'layers.0:rank=64'" in said
    assert "layers.3 " not in said
    assert "9 more linears are below 12 dB" in said


def test_good_layers_are_not_talked_about(capsys: pytest.CaptureFixture[str]) -> None:
    layer_report.warn([report("a"), report("b", sqnr=math.inf)], Output())
    assert capsys.readouterr().err == ""


def test_equal_warnings_are_said_once() -> None:
    reports = [
        report("a", warnings=["damping raised to 0.1", "only 5 tokens for 64 input features"]),
        report("b", warnings=["damping raised to 1.0e-2"]),
        report("c", warnings=["fell back to round-to-nearest"]),
    ]
    assert same_warnings(reports) == {
        "damping raised to 0.1": ["a", "b"],
        "only 5 tokens for 64 input features": ["a"],
        "fell back to round-to-nearest": ["c"],
    }


def test_table_has_a_row_a_linear() -> None:
    lines = layer_report.table_of([report("a"), report("long.path", sqnr=math.inf)]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("a ")
    assert "inf" in lines[3]


def test_a_searched_smoothing_has_a_column() -> None:
    searched = report("b")
    searched.smooth_strength = 0.4
    lines = layer_report.table_of([report("a"), searched]).splitlines()
    assert lines[0].endswith("smoothing")
    assert lines[2].endswith(" -")
    assert lines[3].endswith(" 0.4")
    assert "smoothing" not in layer_report.table_of([report("a")])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_json_has_no_infinity(value: float) -> None:
    assert json.dumps(layer_report._finite(value), allow_nan=False) == "null"
