"""Real engines under the profiler: the same step, traced and taken apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from omnivoice_fixture import require_omnivoice
from omniw4 import profile
from omniw4.bench.omnivoice import with_random_quantized
from omniw4.cli import app
from omniw4.errors import UsageError
from omniw4.profile import trace
from omniw4.profile.engines import random_backbone
from omniw4.profile.result import ProfileResult
from omniw4.tensors import LinearSpec

LAYERS, TOKENS = 2, 48


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_backbone(tiny=True, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def result(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> ProfileResult:
    out = tmp_path_factory.mktemp("traces")
    engines = profile.backbone(
        ["hf", "swapped", "reference"], model, lambda: with_random_quantized(model, LinearSpec(rank=8)),
        tokens=TOKENS, sequences=2,
    )  # fmt: skip
    found = profile.run(engines, device="cpu", tokens=TOKENS, sequences=2, steps=2, warmup=1, repetitions=3, out=out)
    found.environment["out"] = str(out)
    return found


def test_engines_do_the_same_work(model: torch.nn.Module) -> None:
    """Without a mask that hides anything, packed and padded forwards of one sequence are equal."""
    hf, packed = profile.backbone(["hf", "reference"], model, tokens=TOKENS, sequences=1)
    with torch.inference_mode():
        torch.testing.assert_close(packed.step(), hf.step()[0], rtol=1e-3, atol=1e-4)


def test_the_linears_are_counted(result: ProfileResult) -> None:
    hf, swapped, reference = result.engines
    calls = {e.name: {row.name: row.count for row in e.top} for e in result.engines}
    assert calls["hf"]["aten::mm"] == 7 * LAYERS
    assert calls["swapped"]["omniw4::gemm_lora_up"] == calls["swapped"]["omniw4::quantize_lora_down"] == 7 * LAYERS
    assert calls["reference"]["omniw4::qknorm_rope"] == LAYERS
    assert "quantize" not in {row.kind for row in hf.breakdown}
    assert "quantize" in {row.kind for row in swapped.breakdown}
    assert {row.kind for row in reference.breakdown} >= {"GEMM", "attention"}


def test_figures_fit_together(result: ProfileResult) -> None:
    for engine in result.engines:
        assert engine.step_ms > 0
        assert sum(row.share for row in engine.breakdown) == pytest.approx(1)
        assert sum(row.ms for row in engine.breakdown) == pytest.approx(engine.busy_ms, rel=1e-6)
        assert sum(row.count for row in engine.breakdown) == pytest.approx(engine.kernels)
        assert 0 <= engine.idle_share <= 1
        assert (engine.launches, engine.launch_us) == (0, None), "nothing is launched on a CPU"
    assert result.speedup(0) is None
    assert any("on a CPU" in note for note in result.notes)


def test_gaps_are_ordered_and_name_python(result: ProfileResult) -> None:
    for engine in result.engines:
        lengths = [gap.us for gap in engine.gaps]
        assert lengths == sorted(lengths, reverse=True)
    assert any("modeling_qwen3.py" in frame for gap in result.engines[0].gaps for frame in gap.python)


def test_traces_are_what_perfetto_reads(result: ProfileResult) -> None:
    """Compressed JSON with traceEvents, complete events with name, ts, dur, pid and tid, and the marked steps."""
    for engine in result.engines:
        assert engine.trace is not None
        file = Path(result.environment["out"]) / engine.trace
        assert file.read_bytes()[:2] == b"\x1f\x8b"
        events = trace.load(file)
        assert len(trace.steps(events)) == result.steps
        complete = [event for event in events if event["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)


def test_the_document_is_json(result: ProfileResult) -> None:
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [engine["name"] for engine in document["engines"]] == ["hf", "swapped", "reference"]
    assert document["engines"][1]["speedup"] == pytest.approx(result.engines[0].step_ms / result.engines[1].step_ms)


def test_engines_that_lack_their_model(model: torch.nn.Module) -> None:
    with pytest.raises(UsageError, match="'swapped' needs the quantized model"):
        profile.backbone(["swapped"], model, tokens=8)
    with pytest.raises(UsageError, match="'hf' needs the original model"):
        profile.backbone(["hf"], None, lambda: model, tokens=8)
    with pytest.raises(UsageError, match="no engine 'tensorrt'") as caught:
        profile.backbone(["tensorrt"], model, tokens=8)
    assert "w4a4" in caught.value.hint
    with pytest.raises(UsageError, match="'hf' is named twice"):
        profile.backbone(["hf", "swapped", "hf"], model, tokens=8)
    with pytest.raises(UsageError, match="fewer than 3 sequences"):
        profile.backbone(["hf"], model, tokens=2, sequences=3)


def test_omnivoice_with_and_without_the_engine() -> None:
    """One model serves the engines in any order: patched for a back end, restored for the package."""
    require_omnivoice()
    from omniw4.model.omnivoice import TINY, random_omnivoice

    model = random_omnivoice(TINY, tiny_codec=True)
    package, reference = profile.omnivoice(["package", "reference"], model, seconds=0.5, num_step=1)
    with torch.inference_mode():
        for engine, patched in ((package, False), (reference, True), (package, False)):
            (wave,) = engine.step()
            assert len(wave) >= 0.4 * model.sampling_rate
            assert ("_generate_iterative" in model.__dict__) is patched
    with pytest.raises(UsageError, match="'w4a4' needs the quantized model"):
        profile.omnivoice(["w4a4"], model)
    with pytest.raises(UsageError, match="no engine 'hf'"):
        profile.omnivoice(["hf"], model)
    with pytest.raises(UsageError, match="'package' is named twice"):
        profile.omnivoice(["package", "package"], model)


def test_the_verb(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "profile"
    arguments = ["profile", "--tiny", "--tokens", "32", "--steps", "1", "--repetitions", "1", "--out", str(out)]
    assert app.run([*arguments, "--json"]) == 0
    told = capfd.readouterr()
    document = json.loads(told.out)
    assert told.err == "", "the profiler's own log goes to the file descriptor"
    assert [engine["name"] for engine in document["engines"]] == ["hf", "reference"]
    assert json.loads((out / "profile.json").read_text()) == document
    assert sorted(p.name for p in out.iterdir()) == ["profile.json", "trace-hf.json.gz", "trace-reference.json.gz"]
    (out / "notes.txt").write_text("x")
    assert app.run([*arguments, "--engine", "hf"]) == 0, "an earlier profile is replaced"
    shown = capfd.readouterr().out
    assert (out / "notes.txt").read_text() == "x"
    assert [engine["name"] for engine in json.loads((out / "profile.json").read_text())["engines"]] == ["hf"]
    assert "hf: longest kernels" in shown
    assert "ui.perfetto.dev" in shown


def test_user_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "profile.json").write_text('{"user": "settings"}')
    out = ["--out", str(tmp_path / "out")]
    for arguments in (
        ["--what", "codec", *out], ["--tiny", "--engine", "tpu", *out], ["--tiny", "--engine", "w4a4x", *out],
        ["--tiny", "--engine", "hf,hf", *out], ["--tiny", "--engine", "hf", "--engine", "hf", *out],
        ["--tiny", "--tokens", "0", *out], ["no/such/model", *out], ["x", "--tiny", *out],
        ["--tiny", "--tokens", "8", "--out", str(tmp_path / "precious")],
    ):  # fmt: skip
        assert app.run(["profile", *arguments]) == 2, arguments
        told = capsys.readouterr()
        assert told.out == ""
        assert sum(line.startswith("error: ") for line in told.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "precious" / "profile.json").read_text() == '{"user": "settings"}'
