"""A file of prompts for OmniVoice: JSON lines, one object a prompt::

    {"text": "What is said.", "duration": 2.5, "language": "en", "instruct": null,
     "ref_text": "What the reference says.", "ref_audio": "voice.wav"}

``text`` alone is needed. Without ``duration`` (seconds) the package estimates it. The reference is ``ref_audio``, a
file beside the prompts that the model's codec encodes, or ``ref_codes``, ``[C][frames]`` integers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omniw4.calibrate.text import refuse_half_characters
from omniw4.errors import DatasetError
from omniw4.storage import sha256_file

_KEYS = {"text", "duration", "language", "instruct", "ref_text", "ref_audio", "ref_codes"}
FORMAT = "docs/omnivoice.md describes the file"


@dataclass(frozen=True)
class SpeechPrompt:
    """One thing to say."""

    text: str
    duration: float | None = None  # seconds
    language: str | None = None
    instruct: str | None = None
    ref_text: str | None = None
    ref_audio: Path | None = None
    ref_codes: torch.Tensor | None = None  # [C, frames] int64


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and where they came from."""

    prompts: list[SpeechPrompt]
    name: str
    sha256: str


def read_prompts(path: str | Path) -> PromptSet:
    """Read a file of prompts.

    Raises:
        DatasetError: no such file, no prompt in it, or a line that is not as the module's docstring says.
    """
    path = Path(path).expanduser()
    if path.exists() and not path.is_file():  # a device never ends, and a pipe can be read only once
        raise DatasetError(f"prompts {str(path)!r} are no regular file", hint=FORMAT)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON strings hold U+2028 as it is
    except (OSError, UnicodeDecodeError) as e:
        raise DatasetError(f"prompts {str(path)!r} cannot be read: {e}", hint=FORMAT) from e
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = [_prompt(line, f"line {number} of prompts {path.name!r}", path.parent) for number, line in numbered]
    if not prompts:
        raise DatasetError(f"prompts {path.name!r} is empty", hint=FORMAT)
    return PromptSet(prompts, path.name, sha256_file(path))


def _prompt(line: str, where: str, folder: Path) -> SpeechPrompt:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise DatasetError(f"{where} is not JSON: {e}", hint=FORMAT) from e
    if not isinstance(raw, dict) or not isinstance(raw.get("text"), str) or not raw["text"].strip():
        raise DatasetError(f"{where} has no text", hint=FORMAT)
    if unknown := sorted(raw.keys() - _KEYS):
        raise DatasetError(f"{where} has the unknown key {unknown[0]!r}", hint=f"there are {', '.join(sorted(_KEYS))}")
    texts = {key: raw.get(key) for key in ("text", "language", "instruct", "ref_text", "ref_audio")}
    if wrong := [key for key, value in texts.items() if not isinstance(value, str | None)]:
        raise DatasetError(f"{where}: {wrong[0]} is {raw[wrong[0]]!r}, wanted text", hint=FORMAT)
    for key, value in texts.items():
        refuse_half_characters(value or "", f"{key} in {where}")
    duration = raw.get("duration")
    if duration is not None and (isinstance(duration, bool) or not isinstance(duration, int | float) or duration <= 0):
        raise DatasetError(f"{where}: duration is {duration!r}, wanted seconds above 0", hint=FORMAT)
    codes = None if raw.get("ref_codes") is None else _codes(raw["ref_codes"], where)
    audio = None if raw.get("ref_audio") is None else folder / str(raw["ref_audio"])
    if audio is not None and not audio.is_file():
        raise DatasetError(
            f"{where}: ref_audio {raw['ref_audio']!r} does not exist", hint="paths begin at the prompts' folder"
        )
    if (codes is not None or audio is not None) and not raw.get("ref_text"):
        raise DatasetError(f"{where} has a reference without ref_text, which the model reads with it", hint=FORMAT)
    return SpeechPrompt(
        raw["text"], duration, raw.get("language"), raw.get("instruct"), raw.get("ref_text"), audio, codes
    )


def _codes(value: Any, where: str) -> torch.Tensor:
    try:
        codes = torch.tensor(value)
    except (TypeError, ValueError) as e:
        raise DatasetError(f"{where}: ref_codes are not rows of integers of one length: {e}", hint=FORMAT) from e
    if codes.dim() != 2 or codes.dtype != torch.int64 or codes.numel() == 0:
        raise DatasetError(f"{where}: ref_codes are {codes.dtype} of shape {list(codes.shape)}", hint=FORMAT)
    return codes
