"""Options that several verbs share, declared once so that they read the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from omniw4.errors import EXIT_INTERRUPTED, OmniW4Error

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face model folder, .gguf file, or Hub name.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder made by `omniw4 quantize`.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; it appears when it is complete.")]
Config = Annotated[
    str | None, typer.Option("--config", metavar="FILE|NAME", help="YAML diff on the default, or a shipped name.")
]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="TEXT", help=".txt, .jsonl, .parquet or Hub name; without it a built-in text."),
]
Device = Annotated[str, typer.Option("--device", help="Torch device: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")]
GgufFile = Annotated[
    str | None, typer.Option("--gguf-file", metavar="NAME", help="The GGUF file of the model folder to read.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model folder brings.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out, whole or not at all.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and no talk.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes; warnings and errors stay.")]


class Interrupted(OmniW4Error):
    """Ctrl-C or SIGTERM; the message says what is kept."""

    exit_code = EXIT_INTERRUPTED


@contextmanager
def interruptible(kept: str, hint: str = "") -> Iterator[None]:
    """Turn Ctrl-C into the one sentence on what is kept.

    Args:
        kept: what remains on disk, such as ``"finished layers are kept in out.partial"``.
        hint: how to go on.
    """
    try:
        yield
    except KeyboardInterrupt as e:
        raise Interrupted(f"interrupted; {kept}", hint=hint) from e
