"""The real omnivoice package generating through quantized linears under ``llm.``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import omnivoice_fixture
import omniw4
from omnivoice_fixture import require_omnivoice
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from problems import assert_same
from tiny_models import quantize_blocks, write_checkpoint

TEXT = "Hello world, this is a tiny random model."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return omnivoice_fixture.build(tmp_path_factory.mktemp("omnivoice") / "source")


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Path:
    write_checkpoint(source, source.parent, LinearSpec(), {"down_proj": LinearSpec(act_bits=8)})
    return source.parent / "checkpoint"


def original(source: Path) -> nn.Module:
    return require_omnivoice().from_pretrained(source, dtype=torch.float32)  # type: ignore[attr-defined]


def generate(model: nn.Module, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.as_tensor(wave) for wave in model.generate(language="en", num_step=4, **options)]  # type: ignore[operator]


def quantized_paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, W4A4Linear)]


def test_swapped_linears_generate(source: Path) -> None:
    model = original(source)
    report = swap(model, quantize_blocks(model, LinearSpec()))
    assert len(report.replaced) == 14
    assert all(path.startswith("llm.layers.") for path in report.replaced)
    assert "audio_heads" in report.not_replaced
    assert not any(path.startswith("llm.") for path in report.not_replaced)
    calls = []
    model.llm.register_forward_hook(lambda module, inputs, output: calls.append(output[0].isfinite().all()))
    (wave,) = generate(model, text=TEXT)
    assert wave.numel() > 24000 // 2
    assert wave.isfinite().all()
    assert len(calls) == 4
    assert all(calls)
    assert_same(generate(model, text=TEXT)[0], wave, "the same seed again")


def test_sixteen_bit_activations_generate_what_dequantized_weights_do(source: Path) -> None:
    model, dense = original(source), original(source)
    quantized = quantize_blocks(model, LinearSpec(act_bits=16))
    swap(model, quantized)
    for path, linear in quantized.items():
        dense.get_submodule(path).weight.data = linear.dequantize()
    codes: dict[str, list[torch.Tensor]] = {"swapped": [], "dense": []}
    for name, each in (("swapped", model), ("dense", dense)):
        each.llm.register_forward_hook(lambda m, i, output, name=name: codes[name].append(output[0].clone()))
        generate(each, text=TEXT)
    assert len(codes["dense"]) == 4
    first, wanted = codes["swapped"][0], codes["dense"][0]
    assert (first - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_as_an_omnivoice(source: Path, checkpoint: Path, dtype: torch.dtype) -> None:
    loaded = omniw4.load(checkpoint, dtype=dtype)
    assert type(loaded) is require_omnivoice()
    assert len(quantized_paths(loaded)) == 14
    assert {p.dtype for name, p in loaded.named_parameters() if not name.startswith("audio_tokenizer.")} == {dtype}
    direct = require_omnivoice().from_pretrained(checkpoint, dtype=dtype)  # type: ignore[attr-defined]
    assert quantized_paths(direct) == quantized_paths(loaded)
    if dtype == torch.float32:
        model = original(source)
        swap(model, {path: loaded.get_submodule(path).quantized() for path in quantized_paths(loaded)})
        wave = generate(model, text=TEXT)[0]
        assert_same(generate(loaded, text=TEXT)[0], wave, "loaded and swapped")
        assert_same(generate(direct, text=TEXT)[0], wave, "from_pretrained and swapped")


def test_voice_cloning_in_a_batch(checkpoint: Path) -> None:
    model = omniw4.load(checkpoint)
    reference = torch.randn(1, 24000 * 2, generator=torch.Generator().manual_seed(3)) * 0.1
    waves = generate(
        model,
        text=["Hello there.", "A somewhat longer second sentence in the batch."],
        ref_audio=[(reference, 24000)] * 2,
        ref_text=["Nice to meet you."] * 2,
        duration=[1.0, 2.0],
        postprocess_output=False,
    )
    assert [wave.numel() >= seconds * 24000 for wave, seconds in zip(waves, (1, 2), strict=True)] == [True, True]
    assert waves[1].numel() - waves[0].numel() == 24000
    assert all(wave.isfinite().all() for wave in waves)
