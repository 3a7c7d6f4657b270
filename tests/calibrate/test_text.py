"""Datasets: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniw4.calibrate import text
from omniw4.calibrate.dataset import dataset_name
from omniw4.calibrate.text import narrowness, read_text
from omniw4.errors import DatasetError

DOCS = ["The first document.", "Second, with 'quotes'\nand two lines.", "Ünïcödé — third."]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(DOCS), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "text": d}) for i, d in enumerate(DOCS)) + "\n\n")
    else:
        pq.write_table(pa.table({"id": [0, 1, 2, 3], "text": [*DOCS, None]}), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_gives_the_same_text(tmp_path: Path, kind: str) -> None:
    assert "\n\n".join(read_text(write(tmp_path, kind))) == "\n\n".join(DOCS)


def test_the_built_in_text_is_general_english() -> None:
    docs = read_text(None)
    assert sum(map(len, docs)) > 200_000
    assert narrowness("\n\n".join(docs), "built-in") == []


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(name: str, config: str | None, **kwargs: object) -> list[dict[str, str]]:
        calls.append((name, config, kwargs["split"]))
        return [{"text": d} for d in DOCS]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_text("someone/corpus:plain") == DOCS
    assert calls == [("someone/corpus", "plain", "train")]


def test_an_unreachable_hub_is_one_sentence() -> None:
    with pytest.raises(DatasetError, match="'no-one/no-such-corpus' is no local file, and not readable from the Hub"):
        read_text("no-one/no-such-corpus")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n ", "holds no text"),
        ("latin.txt", b"caf\xe9 noir", r"latin\.txt' is not UTF-8 text \(byte 3\)"),
        ("rows.csv", b"text\nhello\n", r"rows\.csv' is of kind '\.csv'"),
        ("plain", b"hello", "without a suffix"),
        ("empty.jsonl", b"", "holds no text"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"line 2 of dataset file 'broken\.jsonl' is not JSON"),
        ("deep.jsonl", b"[" * 100_000, r"line 1 of dataset file 'deep\.jsonl' is not JSON"),
        ("digits.jsonl", b'{"a": ' + b"9" * 5000 + b"}", r"line 1 of dataset file 'digits\.jsonl' is not JSON"),
        ("list.jsonl", b"[1, 2]", "line 1 .* holds a list"),
        ("other.jsonl", b'{"body": "a", "id": 1}', "no field 'text'; found body, id"),
        ("number.jsonl", b'{"text": 5}', "is a number, wanted a string"),
        ("half.jsonl", b'{"text": "cut \\ud83d"}', r"line 1 of .*half\.jsonl' holds half a character, '\\ud83d'"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "not UTF-8"),
        ("broken.parquet", b"PAR1 not really PAR1", "not readable parquet"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message) as error:
        read_text(tmp_path / name)
    assert name.partition(".")[0] in error.value.message


def test_a_parquet_without_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "d.parquet")
    with pytest.raises(DatasetError, match="no column 'text'; found body, id"):
        read_text(tmp_path / "d.parquet")


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.parquet", "./none", "/nowhere/none"])
def test_a_missing_file_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match="no dataset file"):
        read_text(name)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is a folder"):
        read_text(tmp_path)


def test_a_huge_dataset_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_CHARS", 30)
    for kind in ("txt", "jsonl", "parquet"):
        assert sum(map(len, read_text(write(tmp_path, kind)))) == 30, kind


@pytest.mark.parametrize(
    "line",
    [
        "<|im_start|>user\nWhat is {i}?<|im_end|>\n<|im_start|>assistant\nIt is {i}.<|im_end|>\n",
        "[INST] What about number {i}? [/INST] It is fine.\n",
        "User: tell me about {i}\nAssistant: gladly, {i} it is\n",
    ],
)
def test_chat_alone_is_warned_about(line: str) -> None:
    chat = "".join(line.format(i=i) for i in range(2000))
    assert any("chat" in warning for warning in narrowness(chat, "chat.txt"))


def test_few_words_over_and_over_are_warned_about() -> None:
    repeated = "the quick brown fox jumps over the lazy dog " * 500
    assert any("8 distinct words among 4500" in warning for warning in narrowness(repeated, "fox.txt"))


def test_a_name_holds_no_path_of_the_machine(tmp_path: Path) -> None:
    assert dataset_name(write(tmp_path, "txt")) == "data.txt"
    assert dataset_name("someone/corpus") == "someone/corpus"
    assert dataset_name(None) == "python-topics"
