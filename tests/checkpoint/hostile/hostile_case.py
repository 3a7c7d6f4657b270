"""Every way a checkpoint can be wrong: how to make it so, and the error that must say so.

A case changes a valid checkpoint either before it is written, so that it is wrong and consistent with itself, or
afterwards, in its files. ``stage`` says what must notice: opening it, reading its linears, or comparing hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raw_checkpoint import (
    PATH,
    RawCheckpoint,
    raw_checkpoint,
)

from omniw4 import errors

Q, SCALES, NORM = f"{PATH}.qweight", f"{PATH}.w_scales", "model.norm.weight"
WEIGHTS, INDEX, MANIFEST, CONFIG = "model.safetensors", "model.safetensors.index.json", "omniw4.json", "config.json"
NAN, INF = struct.pack("<H", 0x7E00), struct.pack("<H", 0xFC00)


@dataclass(frozen=True)
class Case:
    name: str
    error: type[errors.CheckpointError]
    mentions: tuple[str, ...]  # what the message must name
    before: Callable[[RawCheckpoint], Any] = lambda raw: None
    after: Callable[[Path], Any] = lambda folder: None
    stage: Literal["open", "read", "hash"] = "open"
    shards: int = 1

    def make(self, folder: Path) -> Path:
        raw = raw_checkpoint(self.shards)
        self.before(raw)
        raw.write(folder)
        self.after(folder)
        return folder
