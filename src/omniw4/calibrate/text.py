"""Reading text: a local ``.txt``, ``.jsonl`` or ``.parquet`` file, a dataset of the Hub, or Python's own manual."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omniw4.errors import DatasetError

BUILTIN = "python-topics"  # the text used when no dataset is named: pydoc's topics, part of Python
FIELD = "text"
MAX_CHARS = 1 << 26  # read no more than this of a dataset: 16 million tokens of English
_READERS = (".txt", ".jsonl", ".parquet")
_UTF8 = "convert it, such as with `iconv -f latin1 -t utf-8`"
_JSONL = 'a .jsonl file has one object a line, such as {"text": "Once upon a time"}'
_RENAME = "rename the field that holds the text to text, a string a document"
_CHAT_MARKS = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|system|eot_id|start_header_id)\|>|\[/?INST\]|<start_of_turn>"
    r"|^(?:User|Human|Assistant|System|### (?:Instruction|Response)) ?:",
    re.MULTILINE,
)


def read_text(source: str | Path | None) -> list[str]:
    """Documents of a dataset.

    Args:
        source: path of a ``.txt`` (one document), ``.jsonl`` or ``.parquet`` file (one document a row, in the field
            ``text``), a Hub dataset as ``NAME`` or ``NAME:CONFIG`` (its split ``train``, field ``text``), or None
            for the built-in English text.

    Returns:
        Documents that are not empty, the first 64 Mi characters of them.

    Raises:
        DatasetError: naming what is missing, unreadable, of an unknown kind, or empty.
    """
    if source is None:
        return _builtin()
    path, name = Path(source).expanduser(), str(source)
    if not name:
        raise DatasetError("the name of the dataset is empty")
    if path.is_dir():
        raise DatasetError(f"dataset {name!r} is a folder, wanted a file", hint=f"give one of {', '.join(_READERS)}")
    if not path.is_file() and (path.suffix in _READERS or path.is_absolute() or name.startswith(".")):
        raise DatasetError(f"no dataset file {name!r}", hint="check the path given with --dataset")
    if path.is_file():
        if path.suffix not in _READERS:
            kind = f"of kind {path.suffix!r}" if path.suffix else "without a suffix"
            raise DatasetError(f"dataset file {name!r} is {kind}", hint=f"give one of {', '.join(_READERS)}")
        rows = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[path.suffix](path)
    else:
        rows = _read_hub(name)
    docs = _limit(rows)
    if not docs:
        raise DatasetError(f"dataset {name!r} holds no text", hint="give a --dataset that does")
    return docs


def narrowness(text: str, name: str) -> list[str]:
    """Warnings about a text that is unlike what a model meets: all chat, or a few words over and over.

    Crude on purpose: it counts role marks, and distinct words against the square root of all words (Guiraud's
    index; English prose has 15 and more). It says nothing about languages written without spaces.
    """
    sample = text[: 1 << 20]
    warnings = []
    if len(_CHAT_MARKS.findall(sample)) * 2000 > len(sample):
        warnings.append(
            f"dataset {name!r} looks like chat alone (role marks); calibration on chat alone hurts general text"
        )
    words = re.findall(r"\w+", sample.lower())
    distinct = len(set(words))
    if len(words) >= 1000 and distinct < 6 * len(words) ** 0.5:
        warnings.append(f"dataset {name!r} is narrow: {distinct} distinct words among {len(words)}")
    return warnings


def _builtin() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[key] for key in sorted(topics)]


def _limit(rows: Iterable[str]) -> list[str]:
    docs, left = [], MAX_CHARS
    for row in rows:
        if left <= 0:
            break
        if row.strip():
            docs.append(row[:left])
            left -= len(row)
    return docs


def _read_txt(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as f:
            yield f.read(MAX_CHARS)
    except UnicodeDecodeError as e:
        raise DatasetError(f"dataset file {path.name!r} is not UTF-8 text (byte {e.start})", hint=_UTF8) from e
    except OSError as e:
        raise DatasetError(f"cannot read dataset file {path.name!r}: {e.strerror}") from e


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield _field(json.loads(line), f"line {number} of dataset file {path.name!r}")
    except UnicodeDecodeError as e:
        raise DatasetError(f"dataset file {path.name!r} is not UTF-8 text (byte {e.start})", hint=_UTF8) from e
    except (ValueError, RecursionError) as e:  # too deep, or a number of thousands of digits
        reason = e.msg if isinstance(e, json.JSONDecodeError) else e
        raise DatasetError(f"line {number} of dataset file {path.name!r} is not JSON: {reason}", hint=_JSONL) from e
    except OSError as e:
        raise DatasetError(f"cannot read dataset file {path.name!r}: {e.strerror}") from e


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DatasetError(f"reading {path.name!r} needs pyarrow", hint="pip install pyarrow") from e
    try:
        file = pq.ParquetFile(path)
        if FIELD not in file.schema_arrow.names:
            found = ", ".join(file.schema_arrow.names)
            raise DatasetError(f"dataset file {path.name!r} has no column {FIELD!r}; found {found}", hint=_RENAME)
        for batch in file.iter_batches(columns=[FIELD]):
            for row, value in enumerate(batch.column(0).to_pylist()):
                if value is not None:
                    yield _field({FIELD: value}, f"row {row} of dataset file {path.name!r}")
    except (OSError, pa.ArrowException) as e:
        reason = " ".join(str(e).split())
        raise DatasetError(
            f"dataset file {path.name!r} is not readable parquet: {reason}", hint="copy it again, or give a .jsonl"
        ) from e


def _read_hub(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise DatasetError(
            f"dataset {name!r} is no local file, and the package datasets is missing",
            hint="check the path given with --dataset; for a Hub data set, pip install datasets",
        ) from e
    repository, _, config = name.partition(":")
    try:
        rows = load_dataset(repository, config or None, split="train", streaming=True)
        for row in rows:
            yield _field(row, f"dataset {name!r}")
    except DatasetError:
        raise
    except Exception as e:  # datasets raises classes of every library it downloads with
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        hint = "give a local .txt, .jsonl or .parquet file, or NAME:CONFIG of a Hub dataset; check the network"
        raise DatasetError(
            f"dataset {name!r} is no local file, and not readable from the Hub: {reason}", hint=hint
        ) from e


def _kind(value: Any) -> str:
    """What a JSON value is called."""
    names = {"dict": "an object", "list": "a list", "str": "a string", "int": "a number", "float": "a number"}
    return "null" if value is None else names.get(type(value).__name__, f"a {type(value).__name__}")


def _field(row: Any, where: str) -> str:
    if not isinstance(row, dict):
        raise DatasetError(f"{where} holds {_kind(row)}, wanted an object with the field {FIELD!r}", hint=_JSONL)
    if FIELD not in row:
        found = ", ".join(map(str, row)) or "none"
        raise DatasetError(f"{where} has no field {FIELD!r}; found {found}", hint=_RENAME)
    if not isinstance(row[FIELD], str):
        raise DatasetError(f"field {FIELD!r} in {where} is {_kind(row[FIELD])}, wanted a string", hint=_RENAME)
    refuse_half_characters(row[FIELD], f"field {FIELD!r} in {where}")
    return row[FIELD]


def refuse_half_characters(text: str, what: str) -> None:
    """JSON can hold halves of characters beyond U+FFFF, where a text was cut between two; no tokenizer takes them.

    Raises:
        DatasetError: it holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DatasetError(
            f"{what} holds half a character, {text[e.start]!a} at position {e.start}",
            hint="leave it out, such as with text.encode('utf-8', 'ignore').decode() in Python",
        ) from e
