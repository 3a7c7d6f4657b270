"""Models, files and options that do not belong together: told by name, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run, save_model


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
