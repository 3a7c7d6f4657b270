"""More than 10,000 mutations of valid checkpoints: each a named error, or the same numbers."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import mutate_bytes
import mutate_json
import mutate_tensors
import pytest
from hostile_integer_scales import make_integer
from mutation import Base, Mutation, Target, read_all
from raw_checkpoint import raw_checkpoint

from omniw4.checkpoint import Checkpoint, summarize
from omniw4.errors import CheckpointError, MalformedHeaderError, MalformedJsonError, UnreadableFileError

KINDS: dict[str, Callable[[Base], Iterable[Mutation]]] = {
    "truncations": mutate_bytes.truncations,
    "flips": mutate_bytes.flips,
    "splices": lambda base: mutate_bytes.splices(base, 1200),
    "nodes": lambda base: itertools.islice(mutate_json.nodes(base), 0, None, len(base.weight_files)),
    "keys": mutate_json.keys,
    "pairs": lambda base: mutate_json.pairs(base, 600),
    "headers": mutate_tensors.headers,
    "consistent": mutate_tensors.consistent,
    "values": lambda base: mutate_tensors.values(base, 250),
    "damaged data": lambda base: mutate_tensors.damaged_data(base, 250),
    "files": mutate_tensors.files,
    "other recipes": mutate_tensors.other_recipes,
}


def with_integer_scales(folder: Path) -> Path:
    raw = raw_checkpoint(1)
    make_integer(raw)
    return raw.write(folder)


BASES: dict[str, Callable[[Path], Path]] = {
    "one file": lambda folder: raw_checkpoint(1).write(folder),
    "three files": lambda folder: raw_checkpoint(3).write(folder),
    "integer scales": with_integer_scales,
}
MAY_LOAD = {"flips", "splices", "nodes", "keys", "pairs", "other recipes"}  # text without meaning may change
ADDRESS_SPACE = 256 << 20  # bytes above what the process has already: a size that a header claims does not fit


OF_TENSORS = {"headers", "consistent", "values", "damaged data", "other recipes", "keys"}
CASES = [(kind, name) for name in BASES for kind in KINDS if name != "integer scales" or kind in OF_TENSORS]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_mutation_is_refused_by_name_or_changes_nothing(tmp_path: Path, kind: str, name: str) -> None:
    base = Base.read(name, BASES[name](tmp_path / "base"))
    target = Target(base, tmp_path / "target")
    with address_space(ADDRESS_SPACE):
        outcomes = Counter(target.judge(mutation) for mutation in KINDS[kind](base))
    assert sum(outcomes.values()) > 0
    assert outcomes["same"] == 0 or kind in MAY_LOAD
    assert read_all(target.folder) == (base.specs, base.tensors), "the judge left a mutation behind"


def test_there_are_ten_thousand(tmp_path: Path) -> None:
    """And no two are the same."""
    total = 0
    for number, make in enumerate(BASES.values()):
        base = Base.read("", make(tmp_path / str(number)))
        found = {hash(tuple(mutation.files.items())) for kind in KINDS.values() for mutation in kind(base)}
        total += len(found)
    assert total >= 10_000, total


def test_memory_is_bounded_by_the_files(tmp_path: Path) -> None:
    """Some mutations of each kind: what Python allocates stays below sixteen times the files and a constant."""
    base = Base.read("one file", raw_checkpoint(1).write(tmp_path / "base"))
    target = Target(base, tmp_path / "target")
    for kind in KINDS.values():
        for mutation in itertools.islice(kind(base), 0, None, 97):
            size = sum(len(mutation.files.get(name, content) or b"") for name, content in base.files.items())
            tracemalloc.start()
            target.judge(mutation)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 16 * size + (1 << 20), f"{mutation.name}: {peak} bytes for files of {size}"


def test_a_judge_can_tell(tmp_path: Path) -> None:
    """The judge refuses a reader that lets a change through, or that fails without a name."""
    base = Base.read("", raw_checkpoint(1).write(tmp_path / "base"))
    target = Target(base, tmp_path / "target")
    wrong = Base("", base.files, {}, base.tensors)
    with pytest.raises(AssertionError, match="other settings"):
        Target(wrong, tmp_path / "wrong").judge(Mutation("nothing", {}))
    with pytest.raises(AssertionError, match="accepted"):
        target.judge(Mutation("nothing", {}, (MalformedJsonError,)))
    with pytest.raises(AssertionError, match="MissingFileError"):
        target.judge(Mutation("gone", {"config.json": None}, (MalformedJsonError,)))


@pytest.mark.parametrize("name", ["config.json", "omniw4.json", "model.safetensors"])
def test_a_pipe_or_device_does_not_hang(tmp_path: Path, name: str) -> None:
    folder = raw_checkpoint(1).write(tmp_path / "base")
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(path, path)):
        (folder / name).unlink()
        make(folder / name)
        for read in (lambda: Checkpoint.open(folder), lambda: summarize(folder / name)):
            with pytest.raises(CheckpointError):
                read()
    with pytest.raises(UnreadableFileError, match="no regular file"):
        summarize("/dev/zero")


def test_many_keys_do_not_hang(tmp_path: Path) -> None:
    """A header of 100,000 keys, the last of which occurs twice, is refused in one pass."""
    base = Base.read("", raw_checkpoint(1).write(tmp_path / "base"))
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(f'"{i}":{entry}' for i in [*range(100_000), 99_999]) + "}"
    raw = len(header).to_bytes(8, "little") + header.encode()
    mutation = Mutation("many keys", {"model.safetensors": raw}, (MalformedHeaderError,))
    assert Target(base, tmp_path / "target").judge(mutation) == "MalformedHeaderError"


@contextlib.contextmanager
def address_space(extra: int) -> Iterator[None]:
    """No more address space than the process has, and ``extra`` bytes: larger allocations raise MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
