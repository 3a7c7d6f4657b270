"""Mutations of every node of the JSON in a checkpoint: config, omniw4.json, index and tensor headers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from mutation import Base, Mutation, join_file, split_file

Path = tuple[str | int, ...]
DELETE = object()
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(DELETE, None, True, False, 0, 1, -1, 2, 17, 3.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**400),
    *(float("nan"), float("inf"), "", "x", "F16", "U8", "skip", "none", "²", "\ud800", "9" * 5000, "n" * 5000),
    *("..", "../x.safetensors", "/etc/passwd", "model.safetensors", "a\0b", [], [0], [-1], [[]], {}, {"a": {}}, DEEP),
)


def nodes(base: Base) -> Iterator[Mutation]:
    """Each node deleted, and replaced by values of every type and size."""
    for name, document in documents(base).items():
        for path in paths(document):
            for value in VALUES:
                changed = replaced(document, path, value)
                told = "deleted" if value is DELETE else "is deep" if value is DEEP else f"is {ascii(value)[:30]}"
                yield Mutation(f"{name}: {_told(path)} {told}", {name: written(base, name, changed)})


def keys(base: Base) -> Iterator[Mutation]:
    """Each key renamed, doubled with another value, and its value swapped with that of a neighbour."""
    rng = random.Random(3)
    for name, document in documents(base).items():
        for path in paths(document):
            if not path or not isinstance(path[-1], str):
                continue
            key, parent = path[-1], _at(document, path[:-1])
            for other in (key + "_v2", key[:-1], key.upper(), "²", "7" * 5000):
                if other in parent:
                    continue
                changed = copy.deepcopy(document)
                _rename(_at(changed, path[:-1]), key, other)
                yield Mutation(f"{name}: {_told(path)} renamed", {name: written(base, name, changed)})
            changed = copy.deepcopy(document)
            _at(changed, path[:-1])["@twice@"] = rng.choice((None, 8, "x", {}))
            text = json.dumps(changed).replace('"@twice@"', json.dumps(key))
            yield Mutation(f"{name}: {_told(path)} twice", {name: written(base, name, text.encode())})
            neighbours = [other for other in parent if other != key and parent[other] != parent[key]]
            if neighbours:
                other = rng.choice(neighbours)
                changed = copy.deepcopy(document)
                inside = _at(changed, path[:-1])
                inside[key], inside[other] = inside[other], inside[key]
                yield Mutation(f"{name}: {_told(path)} swapped with {other}", {name: written(base, name, changed)})


def pairs(base: Base, count: int) -> Iterator[Mutation]:
    """Two random nodes at once, in one file or in two."""
    rng = random.Random(4)
    found = documents(base)
    for number in range(count):
        files: dict[str, bytes | None] = {}
        changed = dict(found)
        for _ in range(2):
            name = rng.choice(list(found))
            path = rng.choice(paths(changed[name]) or [()])
            changed[name] = replaced(changed[name], path, rng.choice(VALUES))
            files[name] = written(base, name, changed[name])
        yield Mutation(f"pair {number} in {', '.join(files)}", files)


def documents(base: Base) -> dict[str, Any]:
    """The JSON of each file, that of a weight file being its header."""
    return {
        name: json.loads(content if name.endswith(".json") else split_file(content)[0])
        for name, content in base.files.items()
    }


def written(base: Base, name: str, document: Any) -> bytes:
    """The file with this JSON, given as a value or as its text."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return text if name.endswith(".json") else join_file(text, split_file(base.files[name])[1])


def paths(document: Any, prefix: Path = ()) -> list[Path]:
    """Every node but the root, parents first."""
    if isinstance(document, dict):
        inner: list[tuple[str | int, Any]] = list(document.items())
    elif isinstance(document, list):
        inner = list(enumerate(document))
    else:
        return []
    return [path for key, value in inner for path in [(*prefix, key), *paths(value, (*prefix, key))]]


def replaced(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return {} if value is DELETE else value
    changed = copy.deepcopy(document)
    parent = _at(changed, path[:-1])
    if value is DELETE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


def _rename(mapping: dict[str, Any], old: str, new: str) -> None:
    """In place, the order of the keys unchanged."""
    renamed = {new if key == old else key: value for key, value in mapping.items()}
    mapping.clear()
    mapping.update(renamed)


def _told(path: Path) -> str:
    return ".".join(map(str, path))[:80]
