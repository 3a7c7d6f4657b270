"""Captured hidden states: read, checked, run under any mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_models import OmniVoiceLike, assert_same, naive_statistics
from safetensors.torch import save_file

from collected import Collected
from omniw4.calibrate.capture import capture
from omniw4.calibrate.sources import read_hidden
from omniw4.errors import DatasetError, NonFiniteError

S, L, H = 3, 20, 128
LENGTHS = (20, 13, 4)
MASK = torch.arange(L)[None] < torch.tensor(LENGTHS)[:, None]


def hidden_states() -> torch.Tensor:
    return torch.randn(S, L, H, generator=torch.Generator().manual_seed(0))


def write(path: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
    save_file({"hidden_states": hidden_states(), "mask": MASK, **tensors}, path, metadata)
    return path


def statistics(path: Path, batch_size: int = 1, attention: str = "sdpa") -> dict[str, Any]:
    sink = Collected()
    capture(OmniVoiceLike(attention), read_hidden(path), sink, batch_size=batch_size)
    return sink.stats


def alone(bidirectional: bool) -> dict[str, Any]:
    batches = []
    for row, n in zip(hidden_states(), LENGTHS, strict=True):
        inputs: dict[str, Any] = {"inputs_embeds": row[None, :n]}
        if bidirectional:
            inputs["attention_mask"] = torch.ones(1, 1, n, n, dtype=torch.bool)
        batches.append((inputs, torch.ones(1, n, dtype=torch.bool)))
    return naive_statistics(OmniVoiceLike(), batches)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("padding", [0.0, float("nan"), 1e30])
def test_padding_is_never_counted(tmp_path: Path, batch_size: int, attention: str, padding: float) -> None:
    hidden = torch.where(MASK[..., None], hidden_states(), padding)
    path = write(tmp_path / "h.safetensors", {"attention": attention}, hidden_states=hidden)
    wanted = alone(attention == "bidirectional")
    for linear, stats in statistics(path, batch_size).items():
        assert_same(stats, wanted[linear], linear)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_given_4d_mask_is_used(tmp_path: Path, axes: int, attention: str) -> None:
    """OmniVoice's own: real tokens see each other both ways, padding sees itself or nothing."""
    allowed = MASK[:, None, :, None] & MASK[:, None, None, :]
    path = write(tmp_path / "h.safetensors", attention_mask=allowed if axes == 4 else allowed[:, 0].contiguous())
    wanted = alone(bidirectional=True)
    for linear, stats in statistics(path, 3, attention).items():
        assert_same(stats, wanted[linear], linear)


def test_position_ids_are_used(tmp_path: Path) -> None:
    positions = torch.arange(L).repeat(S, 1) * 7
    plain = statistics(write(tmp_path / "a.safetensors"))
    moved = statistics(write(tmp_path / "b.safetensors", position_ids=positions))
    path = "llm.layers.0.self_attn.o_proj"
    assert (plain[path].hessian - moved[path].hessian).norm() > 0.01 * plain[path].hessian.norm()


def test_without_a_mask_every_token_counts(tmp_path: Path) -> None:
    path = tmp_path / "h.safetensors"
    save_file({"hidden_states": hidden_states().half()}, path)
    assert statistics(path)["llm.layers.0.mlp.down_proj"].tokens == S * L


def test_a_token_with_inf_is_left_out_and_does_not_spread(tmp_path: Path) -> None:
    hidden = hidden_states()
    hidden[0, 5, 3] = float("inf")
    path = write(tmp_path / "h.safetensors", {"attention": "bidirectional"}, hidden_states=hidden)
    for linear, stats in statistics(path, 3).items():
        assert (stats.tokens, stats.excluded) == (sum(LENGTHS) - 1, 1), linear


def test_many_tokens_with_nan_are_refused(tmp_path: Path) -> None:
    hidden = hidden_states()
    hidden[0, :10] = float("nan")
    with pytest.raises(NonFiniteError, match=r"10 of 37 .* llm\.layers\.0\.self_attn\.q_proj"):
        statistics(write(tmp_path / "h.safetensors", hidden_states=hidden))


def test_few_tokens_warn_and_strict_fails(tmp_path: Path) -> None:
    path = write(tmp_path / "h.safetensors")
    assert "37 tokens" in read_hidden(path).warnings[0]
    with pytest.raises(DatasetError, match="37 tokens"):
        read_hidden(path, strict=True)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"hidden_states": torch.zeros(3, 20)}, None, r"hidden_states .* shape \[3, 20\]"),
        ({"hidden_states": torch.zeros(3, 20, 128, dtype=torch.int64)}, None, "torch.int64"),
        ({"hidden_states": torch.zeros(0, 20, 128)}, None, r"\[0, 20, 128\]"),
        ({"mask": torch.ones(3, 19)}, None, r"mask .* \[3, 19\], wanted \[3, 20\]"),
        ({"mask": torch.zeros(3, 20)}, None, "holds 0 tokens"),
        ({"attention_mask": torch.ones(3, 2, 20, 20)}, None, r"attention_mask .* \[3, 2, 20, 20\]"),
        ({"position_ids": torch.ones(1, 20)}, None, r"position_ids .* \[1, 20\]"),
        ({}, {"attention": "both"}, "'both'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        read_hidden(write(tmp_path / "h.safetensors", metadata, **tensors))


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        read_hidden(tmp_path / "none.safetensors")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(DatasetError, match=r"not a \.safetensors"):
        read_hidden(tmp_path / "text.txt")
    path = write(tmp_path / "h.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DatasetError, match=r"h\.safetensors' is damaged \(\d+ bytes"):
        read_hidden(path)
    save_file({"mask": MASK}, tmp_path / "m.safetensors")
    with pytest.raises(DatasetError, match="no tensor 'hidden_states'"):
        read_hidden(tmp_path / "m.safetensors")
