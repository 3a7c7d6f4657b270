"""The whole benchmark on a tiny checkpoint: what is asked for, and nothing that was not measured."""

import copy
import json
import sys

import pytest
import torch

from omniw4 import bench
from omniw4 import model as sources
from omniw4.bench import process
from omniw4.bench.model import bench_model
from omniw4.errors import ModelError, OmniW4Error, UsageError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from tiny_checkpoint import make_checkpoint, make_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    model = make_model(root / "model")
    return make_checkpoint(root / "checkpoint", model, act_bits=8), model


@pytest.fixture(scope="module")
def result(folders):
    return bench.run(*folders, what=("ops", "model"), shapes=[(3, 64, 64)], prefill=[(2, 16)], warmup=0, repetitions=3)


def test_a_cpu_says_that_it_times_the_reference(result):
    assert result.path == "reference"
    assert any("the references in plain torch are timed" in note for note in result.notes)
    assert result.ceiling is None
    assert all(row.roofline is None for row in result.ops)


def test_rows_follow_the_checkpoint_and_the_flags(result):
    assert result.passed
    assert {(row.m, row.n, row.k) for row in result.ops if row.op == "linear"} == {(3, 64, 64)}
    assert all(row.act_bits == 8 for row in result.ops)
    (row,) = result.model
    assert (row.batch, row.seq_len, row.mode, row.path) == (2, 16, "eager", "reference")
    assert len(row.quantized.samples) == len(row.original.samples) == 3
    assert 0 < row.relative_error < 0.5
    assert row.speedup == pytest.approx(row.original.median / row.quantized.median)


def test_the_document_holds_settings_and_raw_samples(result):
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["environment"]["repetitions"] == 3
    assert document["environment"]["torch"] == torch.__version__
    assert len(document["ops"][0]["timing"]["samples_us"]) == 3
    assert len(document["model"][0]["original"]["samples_us"]) == 3
    assert document["ops"][1].keys() >= {"op", "m", "n", "k", "tops", "gbs", "ops_per_byte", "roofline", "vs_fp16"}


def test_shapes_of_the_checkpoint_are_the_default(folders):
    found = bench.run(folders[0], warmup=0, repetitions=1)
    assert {(row.n, row.k) for row in found.ops if row.op == "linear"} == {(64, 64), (32, 64), (128, 64), (64, 128)}
    assert {row.m for row in found.ops} == {1, 64, 256}
    assert found.model == []


def test_no_checkpoint_is_needed_for_ops():
    found = bench.run(shapes=[(1, 8, 64)], warmup=0, repetitions=1)
    assert found.passed
    assert len(found.ops) == 8


def test_a_model_whose_output_is_not_finite_is_not_timed(folders, monkeypatch):
    original = W4A4Linear.forward
    monkeypatch.setattr(W4A4Linear, "forward", lambda self, x: original(self, x) * float("nan"))
    found = bench.run(*folders, what=("model",), prefill=[(1, 8)], warmup=0, repetitions=1)
    assert not found.passed
    assert found.model[0].quantized is None
    assert "not finite" in found.model[0].note


def test_a_backbone_without_a_head_is_timed_on_embeddings():
    from transformers import Qwen3Config, Qwen3Model

    from tiny_checkpoint import SIZES, quantize_nearest

    backbone = Qwen3Model(Qwen3Config(**SIZES)).eval()
    quantized = copy.deepcopy(backbone)
    with torch.no_grad():
        linears = sources.block_linears(quantized).items()
        swap(quantized, {path: quantize_nearest(m.weight, m.bias, LinearSpec()) for path, m in linears})
    (row,) = bench_model(backbone, quantized, [(1, 8)], "cpu", path="reference", warmup=0, repetitions=1)
    assert row.checked
    assert 0 < row.relative_error < 0.5


def test_an_original_with_another_output_is_not_timed(folders, tmp_path):
    one, other = (sources.load(m).model for m in (folders[1], make_model(tmp_path / "q", "qwen3")))
    other.resize_token_embeddings(400)
    (row,) = bench_model(one, other, [(1, 8)], "cpu", path="reference", warmup=0, repetitions=1)
    assert not row.checked
    assert "(1, 8, 400) against (1, 8, 320)" in row.note


def test_progress_names_every_case(folders):
    seen = []
    bench.run(*folders, what=("ops", "model"), shapes=[(1, 8, 64), (2, 8, 64)], prefill=[(1, 8)], warmup=0,
              repetitions=1, on_progress=seen.append)  # fmt: skip
    assert [(p.stage, p.done, p.total) for p in seen] == [("ops", 1, 2), ("ops", 2, 2), ("model", 1, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": ("everything",)}, "cannot bench 'everything'"),
        ({"what": ("model",)}, "needs a checkpoint"),
        ({"what": ("quantize",)}, "needs the original"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        bench.run(**arguments)


def test_a_model_that_the_checkpoint_was_not_made_from(folders, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    for what in ("ops", "model"):
        with pytest.raises(ModelError, match=r"made from 'model' with other files than '.*other' holds now"):
            bench.run(folders[0], other, what=(what,), shapes=[(1, 8, 64)], warmup=0, repetitions=1)


@pytest.mark.parametrize("text", ["", "16", "1x2x3", "0x8", "1x8,"])
def test_prefill_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="BATCHxTOKENS"):
        bench.parse_prefill(text)


def test_prefill_is_parsed():
    assert bench.parse_prefill("1x128, 2×352") == [(1, 128), (2, 352)]


RECORD = """
import pathlib, sys
verb, *arguments = sys.argv[1:]
out = pathlib.Path(arguments[arguments.index("--out") + 1])
assert verb == "calibrate" or pathlib.Path(arguments[arguments.index("--stats") + 1]).is_dir()
out.mkdir()
if "--fail" in arguments:
    sys.exit("error: disk full")
"""


def test_quantize_runs_both_verbs_and_leaves_nothing(monkeypatch, tmp_path):
    """The verbs are stood in for by a script that wants what the real ones want."""
    monkeypatch.setattr(process, "_MAIN", RECORD)
    rows = process.bench_quantize(
        "model", calibrate=["--samples", "2"], quantize=["--config", "seed"], workdir=tmp_path
    )
    assert [row.what for row in rows] == ["calibrate", "quantize"]
    assert rows[0].command == ("omniw4", "calibrate", "model", "--out", "TMP/stats", "--samples", "2")
    assert rows[1].command[-2:] == ("--config", "seed")
    assert list(tmp_path.iterdir()) == []


def test_a_verb_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_MAIN", RECORD)
    with pytest.raises(OmniW4Error, match="quantize ended with exit code 1: disk full"):
        process.bench_quantize("model", calibrate=[], quantize=["--fail"], workdir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_script_of_the_verbs_is_the_real_command_line():
    row = process.measure_process("help", [sys.executable, "-c", process._MAIN, "calibrate", "--help"])
    assert row.seconds < 60
