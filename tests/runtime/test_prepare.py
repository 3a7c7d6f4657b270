"""What a loaded model's linears get where a kernel family runs. The family is pretended: packing needs no GPU."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import omniw4
from omniw4 import ops, repack
from omniw4.checkpoint import Checkpoint
from omniw4.errors import StorageError
from omniw4.repack import cache
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same
from tiny_models import MODELS, write_checkpoint

LAYOUT = "mma_s4"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with 4- and 8-bit activations, on a machine that claims to run ``mma_s4`` for the former."""
    write_checkpoint(MODELS["llama-bias"](), tmp_path, LinearSpec(smooth=True), {"down_proj": LinearSpec(act_bits=8)})
    monkeypatch.setattr(
        ops, "kernel_layout", lambda device, act_bits, scale_type: LAYOUT if act_bits == 4 else ops.CANONICAL
    )
    return tmp_path / "checkpoint"


def quantized(model: torch.nn.Module) -> dict[str, W4A4Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, W4A4Linear)}


def check(model: torch.nn.Module, dtype: torch.dtype) -> None:
    assert len(quantized(model)) == 14
    for path, module in quantized(model).items():
        assert module.layout == ("canonical" if path.endswith("down_proj") else LAYOUT), path
        if module.layout == LAYOUT:
            wanted = repack.get(LAYOUT).pack(module.quantized())
            assert_same(module.get_buffer("packed_qweight"), wanted["qweight"], path)
            assert_same(module.get_buffer("packed_w_scales"), wanted["w_scales"], path)
            assert_same(module.get_buffer("packed_proj_up"), wanted["proj_up"].to(dtype), path)
            assert_same(module.get_buffer("packed_inv_smooth"), wanted["smooth"].float().reciprocal(), path)


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModel"])
def test_the_cache_is_made_once_and_used(folder: Path, auto_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache.cache_file(folder, LAYOUT, Checkpoint.open(folder).hash)
    assert not file.exists()
    load = getattr(transformers, auto_class).from_pretrained
    check(load(folder, dtype=torch.bfloat16), torch.bfloat16)
    assert file.is_file()
    before = file.stat().st_mtime_ns
    layout, pack = repack.get(LAYOUT), repack.get(LAYOUT).pack

    def for_shapes_only(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        assert linear.qweight.device.type == "meta", "packed although there is a cache"
        return pack(linear)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "pack", for_shapes_only)
        again = load(folder, dtype=torch.bfloat16)
    check(again, torch.bfloat16)
    assert file.stat().st_mtime_ns == before


def test_a_cache_of_another_checkpoint_is_not_used(folder: Path, tmp_path: Path) -> None:
    omniw4.load(folder)
    stale = cache.cache_file(folder, LAYOUT, Checkpoint.open(folder).hash)
    (tmp_path / "more").mkdir()
    write_checkpoint(MODELS["llama-bias"](), tmp_path / "more", LinearSpec(rank=32))
    other = tmp_path / "more" / "checkpoint"
    shutil.copytree(stale.parent, other / stale.parent.name)
    shutil.copy(stale, cache.cache_file(other, LAYOUT, Checkpoint.open(other).hash))
    for path, module in quantized(omniw4.load(other)).items():
        wanted = repack.get(LAYOUT).pack(module.quantized())
        assert_same(module.get_buffer("packed_proj_down"), wanted["proj_down"].float(), path)


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StorageError("cannot create the cache: read-only file system")

    monkeypatch.setattr(cache, "ensure", full)
    with caplog.at_level(logging.WARNING):
        check(omniw4.load(folder, dtype=torch.bfloat16), torch.bfloat16)
    assert "packing mma_s4 in memory: cannot create the cache: read-only file system" in caplog.text


def test_nothing_is_written_where_the_reference_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {module.layout for module in quantized(omniw4.load(folder)).values()} == {"canonical"}
    assert not (folder / cache.FOLDER).exists()
