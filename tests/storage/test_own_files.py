"""A verb's own files in a folder with others: replaced one by one, and nothing else touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omniw4.errors import OutputExistsError, StorageError
from omniw4.storage import OwnFiles

OURS = OwnFiles("x.json", ("part-*.gz",), frozenset({"a"}))


def test_copied_and_written_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\x00\xff")
    out = tmp_path / "new" / "out"
    OURS.put(out, {"part-1.gz": tmp_path / "source", "x.json": '{"a": 1}'})
    (out / "keep").mkdir()
    OURS.put(out, {"x.json": '{"a": 2}', "part-2.gz": tmp_path / "source"})
    assert sorted(entry.name for entry in out.iterdir()) == ["keep", "part-1.gz", "part-2.gz", "x.json"]
    assert (out / "x.json").read_text() == '{"a": 2}'
    assert (out / "part-2.gz").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("name", ["part-1.gz", "x.json"])
def test_what_is_not_ours_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(OutputExistsError, match="no earlier result"):
        OURS.check(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(OutputExistsError, match="is no file"):
        OURS.check(tmp_path)
    with pytest.raises(OutputExistsError, match="not a folder"):
        OURS.check(__file__)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "sealed").mkdir(mode=0o500)
    for out in (tmp_path / "sealed", tmp_path / "sealed" / "new"):
        with pytest.raises(StorageError, match="Permission denied"):
            OURS.check(out)
