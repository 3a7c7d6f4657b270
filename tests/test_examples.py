"""The examples run, on tiny models and a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import omnivoice_fixture
from omniw4.model.omnivoice import byte_tokenizer
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_omnivoice(tmp_path: Path) -> None:
    source = omnivoice_fixture.build(tmp_path / "source")
    write_checkpoint(source, tmp_path, LinearSpec())
    import soundfile

    for options in ((), ("--checkpoint", str(tmp_path / "checkpoint"))):
        torch.manual_seed(0)
        example("omnivoice_accelerate").main(
            [str(source), "Hello, world.", str(tmp_path / "x.wav"), "--device", "cpu", *options]
        )
        wave, rate = soundfile.read(tmp_path / "x.wav")
        assert rate == 24000
        assert len(wave) > rate // 4


def test_qwen3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = qwen3(tie_word_embeddings=True)
    source = tmp_path / "source"
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    text = "The capital of France is Paris."
    with torch.inference_mode():
        ids = byte_tokenizer()(text, return_tensors="pt").input_ids
        wanted = float(model(ids, labels=ids).loss)
    arguments = [str(source), text, "--device", "cpu"]
    assert example("qwen3_accelerate").main(arguments) == pytest.approx(wanted, rel=1e-4)
    assert capsys.readouterr().out == f"{wanted:.4f}\n"
    write_checkpoint(source, tmp_path, LinearSpec(act_bits=16))
    quantized = example("qwen3_accelerate").main([*arguments, "--checkpoint", str(tmp_path / "checkpoint")])
    assert quantized == pytest.approx(wanted, rel=0.2)
    assert quantized != wanted
