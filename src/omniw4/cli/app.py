"""The ``omniw4`` command: its verbs, and the one place where errors become exit codes.

0 well · 1 a verdict failed · 2 usage, config, input, I/O, unsupported GPU · 101 internal · 130 interrupted · 141 a pipe
that was closed before the work was done; one that is closed while the result is printed changes no exit code.
``OMNIW4_DEBUG=1`` shows tracebacks. Nothing here imports torch, so that ``omniw4 --help`` answers at once.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from omniw4 import __version__
from omniw4.cli import (
    bench,
    calibrate,
    doctor,
    export,
    generate,
    inspect,
    options,
    profile,
    quantize,
    repack,
    report,
    roofline,
    sensitivity,
    sweep,
    verify,
)
from omniw4.cli.output import print_error, silence_stdout
from omniw4.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE, OmniW4Error, UsageError

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# system errors that are the user's to mend, wherever a library lets them through
_OS_HINTS = {
    errno.ENOSPC: "free some space, or use a folder on another disk",
    errno.EDQUOT: "free some space, or use a folder on another disk",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "the file system is read-only: use a folder elsewhere",
    errno.EACCES: "check the permissions, or use a folder elsewhere",
    errno.EPERM: "check the permissions, or use a folder elsewhere",
    errno.ENOTDIR: "a part of this path is a file",
    errno.ENAMETOOLONG: "use a shorter name",
}


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C as an error of ours, before typer turns it into a silent exit; a verb may have said more already."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        with options.interruptible("nothing was written"):
            command(**arguments)

    return wrapped


app = typer.Typer(
    name="omniw4",
    help="W4A4 quantization and inference for Qwen3-like models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _verb, _module in {
    "generate": generate,
    "calibrate": calibrate,
    "quantize": quantize,
    "repack": repack,
    "verify": verify,
    "bench": bench,
    "inspect": inspect,
    "profile": profile,
    "report": report,
    "export": export,
    "roofline": roofline,
    "sensitivity": sensitivity,
    "sweep": sweep,
    "doctor": doctor,
}.items():
    app.command(name=_verb)(_interruptible(_module.command))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"omniw4 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """W4A4 quantization and inference for Qwen3-like models."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end hours of work
    # a job started to ignore a signal (nohup) goes on doing so
    heeded = [one for one in _INTERRUPTS if signal.getsignal(one) is not signal.SIG_IGN]
    try:
        for one in heeded:
            signal.signal(one, options.raise_interrupt)
        code = run(sys.argv[1:] if arguments is None else arguments)
        for one in heeded:
            signal.signal(one, signal.SIG_DFL)  # nothing is left to be said: not by the interpreter's end either
    except KeyboardInterrupt as error:
        code = _exit_code(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:  # a full disk
        code = _exit_code(error)
        silence_stdout()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit code, whatever happens."""
    try:
        _check_place(arguments)
        code = app(arguments, prog_name="omniw4", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except BaseException as error:
        if os.environ.get("OMNIW4_DEBUG") == "1" and not isinstance(error, SystemExit | typer.Exit):
            traceback.print_exc()
        return _exit_code(error)


def _check_place(arguments: list[str]) -> None:
    """Refuse where libraries cannot work: in a folder that was removed, with names that are no UTF-8."""
    try:
        here = os.getcwd()
    except OSError as e:
        raise UsageError("the current folder is gone", hint="change into one that is there") from e
    for text in (*arguments, here):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            hint = "rename it; where the name looks right, set a locale: LC_ALL=C.UTF-8"
            raise UsageError(f"{text!r} is not UTF-8", hint=hint) from e


def _exit_code(error: BaseException) -> int:
    """Print what an exception means to the user; returns the code to end with."""
    if isinstance(error, OmniW4Error):
        print_error(error.message, error.hint)
        return error.exit_code
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        print_error("interrupted; nothing was written")
        return EXIT_INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())  # type: ignore[attr-defined]
        return EXIT_USAGE
    if hasattr(error, "format_message"):  # a usage error of typer, whose class has no public name in every version
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "omniw4"
        print_error(_sentence(_humanly(error.format_message())), f"`{command} --help` lists what there is")
        return EXIT_USAGE
    # click answers a closed pipe by SystemExit(1), which is the code of a failed verdict
    if isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
        return EXIT_PIPE
    if isinstance(error, OSError) and error.errno in _OS_HINTS:
        where = f" {str(error.filename)!r}" if error.filename else ""
        print_error(f"{error.strerror}{where}", _OS_HINTS[error.errno])
        return EXIT_USAGE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_INTERNAL
    if _is_out_of_memory(error):
        print_error(
            "out of memory", "try shorter sequences, a smaller --batch-size, --dtype bfloat16, or a larger machine"
        )
        return EXIT_USAGE
    said = str(error).splitlines()  # torch adds its own stack below
    print_error(
        f"internal error: {type(error).__name__}: {said[0][:300] if said else ''}".rstrip(": "),
        "this is a bug of omniw4; OMNIW4_DEBUG=1 shows where it happened",
    )
    return EXIT_INTERNAL


# what typer has from pydantic about the value of an option
_WANTED = (
    (r"Input should be a valid integer.*", "wanted a whole number"),
    (r"Input should be a valid (?:number|float).*", "wanted a number"),
    (r"Input should be a valid boolean.*", "wanted true or false"),
    (r"Input should be greater than or equal to (\S+)", r"wanted at least \1"),
    (r"Input should be less than or equal to (\S+)", r"wanted at most \1"),
    (r"Input should be greater than (\S+)", r"wanted more than \1"),
    (r"Input should be less than (\S+)", r"wanted less than \1"),
    (r"Input should be ", "wanted "),
)


def _humanly(message: str) -> str:
    for pattern, words in _WANTED:
        message = re.sub(pattern, words, message)
    return message


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, a GPU's, or torch's allocator of the CPU, which has no class for it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].lower() + text[1:].rstrip(".")
