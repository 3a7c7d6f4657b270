"""A checkpoint, a verdict on it, and the document of a report made of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verdicts import VERDICT

from omniw4 import report
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose name is hostile to HTML and Markdown."""
    work = tmp_path_factory.mktemp("report")
    write_checkpoint(qwen3(), work, LinearSpec(rank=8))
    return (work / "checkpoint").rename(work / "a<b>&'c'|d_e_")


@pytest.fixture(scope="package")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("results") / "verify.json"
    file.write_text(json.dumps(VERDICT), encoding="utf-8")
    return file


@pytest.fixture(scope="package")
def document(folder: Path, verdict: Path) -> dict[str, Any]:
    return report.collect(folder, [str(verdict), f"rtn={verdict}"])
