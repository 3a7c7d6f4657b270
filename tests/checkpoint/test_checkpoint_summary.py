"""The summary that ``omniw4 inspect`` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantized_samples import (
    DOWN,
    RECIPE,
    SMOOTH,
)

from omniw4.checkpoint import Checkpoint, summarize
from omniw4.errors import CheckpointError
from omniw4.tensors import QuantizedLinear


def test_summary_of_a_checkpoint(written: tuple[Path, dict[str, QuantizedLinear]]) -> None:
    folder, quantized = written
    summary = summarize(folder)
    assert (summary.kind, summary.name, summary.hash) == ("checkpoint", "out", Checkpoint.open(folder).hash)
    assert [row.path for row in summary.layers] == sorted(quantized)
    rows = {row.path: row for row in summary.layers}
    down = rows["model.layers.0.mlp.down_proj"]
    assert (down.out_features, down.in_features, down.act_bits, down.rank) == (64, 128, DOWN.act_bits, 0)
    assert down.bits == 4.25
    assert rows["model.layers.1.mlp.up_proj"].rotation == SMOOTH.rotation
    weights = sum(q.out_features * q.in_features for q in quantized.values())
    stored = sum(q.effective_bits() * q.out_features * q.in_features for q in quantized.values())
    assert summary.effective_bits == pytest.approx(stored / weights)
    assert summary.original_bytes == 2 * weights
    assert summary.quantized_bytes + summary.other_bytes == sum(row.bytes for row in summary.tensors)
    assert summary.total_bytes == (folder / "model.safetensors").stat().st_size
    assert json.loads(json.dumps(summary.to_dict()))["recipe"] == RECIPE


def test_summary_of_a_file(source_folder: Path) -> None:
    summary = summarize(source_folder / "model.safetensors")
    assert (summary.kind, summary.name) == ("file", "model.safetensors")
    assert summary.metadata == {"format": "pt"}
    assert {row.name: (row.dtype, row.shape) for row in summary.tensors}["model.norm.weight"] == ("BF16", [64])
    with pytest.raises(CheckpointError, match="no quantization_config"):
        summarize(source_folder)
