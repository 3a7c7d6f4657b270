"""Models, files and options that do not belong together: told by name, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness import Run, save_model

from omniw4.checkpoint import schema
from omniw4.report.results import KINDS


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same sizes as the checkpoint's model, with other weights."""
    return save_model(tmp_path_factory.mktemp("models") / "finetuned", seed=1)


def test_bench_and_profile_of_another_model(run: Run, checkpoint: Path, other: Path, tmp_path: Path) -> None:
    for ran in (
        run("bench", checkpoint, "--model", other, "--shapes", "1x64x64"),
        run("profile", other, "--checkpoint", checkpoint, "--out", tmp_path / "out"),
    ):
        ran.failed(
            2, "made from 'tiny-qwen3'", "finetuned", "\n\nhint: give the model that the checkpoint was made from"
        )
        assert ran.stdout == ""
    assert not list(tmp_path.iterdir())


def test_verify_of_a_plain_model(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    """There is no checkpoint to judge; one that lost its settings is damaged, and fails its gate."""
    ran = run("verify", qwen3, "--model", qwen3)
    ran.failed(2, "tiny-qwen3' is no checkpoint of omniw4: config.json has no quantization_config", "omniw4 quantize")
    assert ran.stdout == ""
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    del config["quantization_config"]
    (damaged / "config.json").write_text(json.dumps(config))
    run("verify", damaged, "--model", qwen3).failed(1, "structure: config.json has no quantization_config")


def test_a_layout_that_does_not_hold_the_scales(run: Run, checkpoint: Path) -> None:
    ran = run("repack", checkpoint, "--layout", "mma_s4")
    ran.failed(2, "can run as mma_s4: mma_s4 holds no integer group scales", "hint: give ", "--layout wgmma_s8")
    assert not (checkpoint / ".omniw4-cache").exists()


def test_gguf_files_by_name(run: Run, tmp_path: Path) -> None:
    """One that is missing is no missing folder, and one that is none says so."""
    out = ("--out", tmp_path / "out")
    run("calibrate", tmp_path / "x.gguf", *out).failed(2, "no GGUF file", "x.gguf", "hint: give the path of a .gguf")
    (tmp_path / "empty.gguf").touch()
    run("calibrate", tmp_path / "empty.gguf", *out).failed(2, "'empty.gguf' is no GGUF file: it has 0 bytes", "copy")
    run("calibrate", tmp_path / "empty.gguf", "--gguf-file", "q.gguf", *out).failed(2, "'q.gguf'", "for a model folder")
    assert not (tmp_path / "out").exists()


def test_fewer_tokens_than_sequences(run: Run) -> None:
    ran = run("roofline", "--tokens", "704,5", "--sequences", 9)
    ran.failed(2, "5 tokens are fewer than 9 sequences", "--tokens", "--sequences")
    assert ran.stdout == ""


def test_linears_are_compared_on_hopper_alone(run: Run) -> None:
    ran = run("bench", "--what", "linear")
    ran.failed(2, "compute capability 9.0", "hint: `--what ops`", "omniw4 roofline")


def test_results_that_stay_behind_are_those_a_report_finds() -> None:
    assert set(schema.RESULTS) == {f"{kind}.json" for kind in KINDS}
