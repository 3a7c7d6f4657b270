"""A mutation of a valid checkpoint, and the judge of what reading it gives.

A checkpoint is a dict of its files' bytes here; a mutation replaces some of them. Whatever the mutation, a reader must
end with one named error of one short sentence, or with exactly the tensors and settings of the checkpoint before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omniw4 import errors
from omniw4.checkpoint import Checkpoint, summarize
from omniw4.errors import CheckpointError

Files = dict[str, bytes]
MAX_MESSAGE = 400  # characters of an error, however large or many the things it is about
CPU_SECONDS = 5.0  # of one mutation; reading the valid checkpoint takes 2 ms
REFUSALS: tuple[type[CheckpointError], ...] = tuple(
    sorted(
        (e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, CheckpointError)),
        key=lambda e: e.__name__,
    )
)


@dataclass(frozen=True)
class Mutation:
    """Files to replace (None deletes one), and which errors may follow.

    ``refused_by`` empty: any named error, or a load of the very same tensors. Otherwise one of these, and no load.
    """

    name: str
    files: dict[str, bytes | None]
    refused_by: tuple[type[CheckpointError], ...] = ()


@dataclass(frozen=True)
class Base:
    """A valid checkpoint, and what reading it gives."""

    name: str
    files: Files
    specs: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, folder: Path) -> Base:
        files = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
        specs, tensors = read_all(folder)
        return cls(name, files, specs, tensors)

    @property
    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".safetensors")]

    @property
    def new_json_files(self) -> list[str]:
        """Those that a checkpoint in one file does not have, if there are any."""
        return [name for name in self.json_files if name.endswith(".index.json")] or self.json_files

    @property
    def json_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".json")]


class Target:
    """A folder that holds the base, and for a moment a mutation of it."""

    def __init__(self, base: Base, folder: Path) -> None:
        self.base, self.folder = base, folder
        folder.mkdir(parents=True)
        for name, content in base.files.items():
            (folder / name).write_bytes(content)

    def judge(self, mutation: Mutation) -> str:
        """Name of the error that refused the mutation, or ``"same"``; raises AssertionError for anything else."""
        try:
            for name, content in mutation.files.items():
                if content is None:
                    (self.folder / name).unlink()
                else:
                    (self.folder / name).write_bytes(content)
            return self._outcome(mutation)
        finally:
            for name in mutation.files:
                if name in self.base.files:
                    (self.folder / name).write_bytes(self.base.files[name])
                else:
                    (self.folder / name).unlink(missing_ok=True)

    def _outcome(self, mutation: Mutation) -> str:
        try:
            with cpu_limit(CPU_SECONDS):
                specs, tensors = read_all(self.folder)
        except CheckpointError as e:
            _check_refusal(mutation, e)
            return type(e).__name__
        except Exception as e:
            raise AssertionError(f"{mutation.name}: {type(e).__name__}: {str(e)[:300]}") from e
        assert not mutation.refused_by, f"{mutation.name}: accepted, wanted {[e.__name__ for e in mutation.refused_by]}"
        assert specs == self.base.specs, f"{mutation.name}: other settings were read: {specs}"
        assert tensors == self.base.tensors, f"{mutation.name}: other numbers were read"
        return "same"


def _check_refusal(mutation: Mutation, error: CheckpointError) -> None:
    """One of the errors the mutation allows, which names a rule, in one short sentence."""
    kind, message = type(error), str(error)
    assert kind in (mutation.refused_by or REFUSALS), f"{mutation.name}: {kind.__name__}: {message}"
    assert kind is not CheckpointError, f"{mutation.name}: no rule is named: {message}"
    assert 0 < len(message) < MAX_MESSAGE, f"{mutation.name}: {len(message)} characters: {message}"
    assert "\n" not in message, f"{mutation.name}: {message}"


def read_all(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Everything a reader can ask of a checkpoint: headers, summary, values, hashes."""
    checkpoint = Checkpoint.open(folder)
    summarize(folder).to_dict()
    tensors = {
        f"{path}.{part}": tensor
        for path in checkpoint.specs
        for part, tensor in checkpoint.linear(path).tensors().items()
    }
    tensors |= {name: checkpoint.other(name) for name in checkpoint.other_names}
    checkpoint.check_hashes()
    return checkpoint.specs, {name: _plain(tensor) for name, tensor in tensors.items()}


def _plain(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), raw


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block takes more processor time; waiting for another process does not count."""

    def expired(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s of processor time")

    previous = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def split_file(raw: bytes) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file."""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return raw[8:end], raw[end:]


def join_file(header: Any, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entries(header: bytes) -> dict[str, Any]:
    """The tensors of a header."""
    return {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}


def with_hashes(base: Base, files: dict[str, bytes]) -> dict[str, bytes | None]:
    """The files, and an omniw4.json that lists their new hashes: damage that is consistent with itself."""
    manifest = json.loads(files.get("omniw4.json", base.files["omniw4.json"]))
    for name in base.weight_files:
        if name in files:
            digest = hashlib.sha256(files[name]).hexdigest()
            manifest["files"][name] = {"bytes": len(files[name]), "sha256": digest}
    config = json.loads(files.get("config.json", base.files["config.json"]))
    if "hash" in manifest:
        shards = {name: entry["sha256"] for name, entry in manifest["files"].items() if "/" not in name}
        canonical = json.dumps([config["quantization_config"], shards], sort_keys=True, separators=(",", ":"))
        manifest["hash"] = hashlib.sha256(canonical.encode()).hexdigest()
    return {**files, "omniw4.json": json.dumps(manifest).encode()}
