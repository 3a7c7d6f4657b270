"""Options that several verbs share, declared once so that they read the same everywhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from omniw4.cli.output import Output, is_terminal
from omniw4.errors import EXIT_INTERRUPTED, OmniW4Error, OutputExistsError, UsageError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face model folder, .gguf file, or Hub name.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder made by `omniw4 quantize`.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; it appears when it is complete.")]
Config = Annotated[
    str | None, typer.Option("--config", metavar="FILE|NAME", help="YAML diff on the default, or a shipped name.")
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="For an OmniVoice: things to say (.jsonl), decoded step by step."),
]
NumStep = Annotated[int, typer.Option("--num-step", metavar="N", min=1, help="Steps of decoding a prompt.")]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="TEXT", help=".txt, .jsonl, .parquet or Hub name; without it a built-in text."),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config, such as recipe.lowrank.rank=32."),
]
Bos = Annotated[
    str | None,
    typer.Option("--bos", metavar="NAME", help="Begin with BOS: model (as its tokenizer does), always or never."),
]
Samples = Annotated[int | None, typer.Option("--samples", metavar="N", min=1, help="Sequences.", show_default="32")]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", min=8, help="Tokens a sequence.", show_default="1024")
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="Torch device: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="auto, float32, float16 or bfloat16.")]
GgufFile = Annotated[
    str | None, typer.Option("--gguf-file", metavar="NAME", help="The GGUF file of the model folder to read.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model folder brings.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out, whole or not at all.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and no talk.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes; warnings and errors stay.")]


def start(*, json_mode: bool, quiet: bool) -> Output:
    """Where a verb prints to. The progress bars of transformers obey the same rules, imported before this or after."""
    if quiet or json_mode or not is_terminal(sys.stderr):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        if imported := sys.modules.get("transformers.utils.logging"):
            imported.disable_progress_bar()
    return Output(json_mode=json_mode, quiet=quiet)


class Interrupted(OmniW4Error):
    """Ctrl-C, SIGTERM or SIGHUP; the message says what is kept."""

    exit_code = EXIT_INTERRUPTED


_signalled = threading.Event()


def raise_interrupt(*_: Any) -> NoReturn:
    """Handler of SIGINT, SIGTERM and SIGHUP: locks released, nothing half-written."""
    _signalled.set()
    raise KeyboardInterrupt


@contextmanager
def interruptible(kept: str | Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Turn Ctrl-C into the one sentence on what is kept.

    Args:
        kept: such as ``"nothing was written"``; or a function that finds out, and says how to go on.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as e:
        # compiled code that an interrupt lands in may hand on an exception of its own instead
        if isinstance(e, Interrupted) or not (isinstance(e, KeyboardInterrupt) or _signalled.is_set()):
            raise
        sentence, hint = (kept, "") if isinstance(kept, str) else kept()
        raise Interrupted(f"interrupted; {sentence}", hint=hint) from e


def check_inputs_apart(out: Path | None, **inputs: str | Path | None) -> None:
    """Refuse an ``--out`` that exists and holds what is read: replacing it would take the input away.

    Args:
        inputs: by the name of their option, such as ``stats``; those that are no path of this machine are left alone.

    Raises:
        OutputExistsError: one of them lies in ``out``.
    """
    if out is None or not out.is_dir():
        return
    place = out.resolve()
    for name, path in inputs.items():
        if path is not None and os.path.exists(path) and place in Path(path).resolve().parents:
            raise OutputExistsError(
                f"{name} {str(path)!r} lies in the output folder {str(out)!r}, which is replaced as a whole",
                hint="give --out another name, or move the input out of that folder",
            )


def check_device(device: str) -> None:
    """Refuse a device that is not there before anything is loaded.

    Raises:
        UsageError: torch does not know it, or this machine does not have it.
    """
    import torch

    try:
        kind = torch.device(device)
        if kind.type == "meta":
            raise UsageError(f"--device {device}: it holds no numbers", hint="use cpu, cuda or cuda:INDEX")
        if kind.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"--device {device}: this machine has no CUDA device", hint="use --device cpu")
        torch.empty(0, device=kind)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0].partition(". ")[0][:200] if str(e) else type(e).__name__
        raise UsageError(f"--device {device}: {reason}", hint="use cpu, cuda or cuda:INDEX") from e


def gpu_capability() -> tuple[int, int] | None:
    """(major, minor) of this machine's GPU; None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
