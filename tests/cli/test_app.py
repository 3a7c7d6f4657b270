"""Exit codes, error format, help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Run, environment

from omniw4 import __version__
from omniw4.errors import OmniW4Error, VerdictError

VERBS = [
    *("generate", "calibrate", "quantize", "repack", "verify", "bench", "inspect"),
    *("profile", "report", "export", "roofline", "doctor"),
]


def test_help_lists_the_verbs(run_process: Run) -> None:
    ran = run_process("--help")
    assert ran.code == 0
    assert ran.stderr == ""
    for verb in VERBS:
        assert f"  {verb} " in ran.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(run: Run, verb: str) -> None:
    ran = run(verb, "--help")
    assert ran.code == 0
    assert "--json" in ran.stdout
    assert "--quiet" in ran.stdout


def test_help_loads_nothing_heavy() -> None:
    """What makes --help slow is imports; a clock on a busy machine would say less."""
    script = (
        "import sys; from omniw4.cli import app; app.run(['quantize', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment())
    loaded = set(done.stderr.split())
    assert "omniw4.cli.quantize" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "datasets", "safetensors", "tokenizers", "rich.progress"}


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"omniw4 {__version__}\n"


def test_no_verb_shows_the_help(run: Run) -> None:
    ran = run()
    assert "calibrate" in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["quantise"], "quantise"),
        (["quantize"], "MODEL"),
        (["calibrate", "m"], "--out"),
        (["quantize", "m", "--out", "x", "--rnak", "8"], "--rnak"),
        (["calibrate", "m", "--out", "x", "--samples", "many"], "--samples"),
        (["calibrate", "m", "--out", "x", "--samples"], "--samples"),
        (["verify", "dir"], "--model"),
        (["inspect", "a", "b"], "b"),
    ],
)
def test_usage_errors(run: Run, arguments: list[str], word: str) -> None:
    ran = run(*arguments)
    ran.failed(2, word, "\n\nhint: `omniw4")
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OmniW4Error("it is broken", hint="mend it"), 2, "error: it is broken\n\nhint: mend it\n"),
        (OmniW4Error("it is broken"), 2, "error: it is broken\n"),
        (VerdictError("1 of 3 gates failed"), 1, "error: 1 of 3 gates failed\n"),
        (OSError(28, "No space left on device", "out/x"), 2, "error: No space left on device 'out/x'\n\nhint: free"),
        (OSError(30, "Read-only file system"), 2, "error: Read-only file system\n\nhint: "),
        (OSError(5, "Input/output error"), 101, "error: internal error: OSError"),
        (
            ZeroDivisionError("division by zero"),
            101,
            "error: internal error: ZeroDivisionError: division by zero\n\nhint: ",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted; "),
        (MemoryError(), 2, "error: out of memory\n\nhint: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "error: out of memory\n\nhint: "),
    ],
)
def test_errors_become_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("omniw4.checkpoint.summarize", fail)
    ran = run("inspect", "anything")
    ran.failed(code)
    assert ran.stderr.startswith(said)
    assert ran.stdout == ""


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIW4_DEBUG", "1")
    ran = run("inspect", "no/such/folder")
    assert ran.code == 2
    assert "Traceback" in ran.stderr
    assert "\nerror: " in ran.stderr


def test_a_folder_that_was_removed_is_no_place_to_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    run("inspect", tmp_path).failed(2, "the current folder is gone", "hint: change into one")


def test_a_name_that_is_no_utf8_is_refused_at_once(run: Run) -> None:
    run("inspect", os.fsdecode(b"m\xff")).failed(2, r"'m\udcff' is not UTF-8", "LC_ALL")


def test_a_terminal_without_the_characters_ends_no_work(checkpoint: Path) -> None:
    variables = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run([sys.executable, "-m", "omniw4", "inspect", checkpoint], capture_output=True, env=variables)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ? " in done.stdout


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_what_a_file_is_opened_as_is_never_stdout_or_stderr(checkpoint: Path, closed: str) -> None:
    program = (
        "import os; from omniw4 import __main__\n"
        "__main__._open_what_is_closed()\n"
        "print('to stdout', flush=True); os.write(2, b'to stderr')\n"
        "assert os.open(os.devnull, os.O_RDONLY) > 2\n"
    )
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], capture_output=True, env=environment()
    )
    heard = (b"" if "1>" in closed else b"to stdout\n", b"" if "2>" in closed else b"to stderr")
    assert (done.returncode, done.stdout, done.stderr) == (0, *heard)


def test_a_full_disk_behind_stdout_is_no_failed_verdict() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "omniw4", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith("error: No space left on device")


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m omniw4 --help | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def closed_pipe(script: str, *, stream: int = 1) -> subprocess.CompletedProcess[str]:
    """A Python script whose stdout (1) or stderr (2) nobody reads, in a process of its own."""
    opened = f"import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, {stream})\n"
    return subprocess.run([sys.executable, "-c", opened + script], capture_output=True, text=True, env=environment())


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("json_mode", [False, True])
def test_a_pipe_closed_at_the_result_changes_no_verdict(code: int, json_mode: bool) -> None:
    done = closed_pipe(
        "from omniw4.cli import app; from omniw4.cli.output import Output; from omniw4.errors import VerdictError\n"
        "@app.app.command(name='judge')\n"
        "def judge():\n"
        f"    Output(json_mode={json_mode}).result('row\\n' * 9999, ['row'] * 9999)\n"
        f"    if {code}: raise VerdictError('1 gate failed')\n"
        "app.main(['judge'])"
    )
    assert done.returncode == code
    assert done.stderr.partition("\n")[0] == ("error: 1 gate failed" if code else "")


def test_a_verb_whose_table_nobody_reads(checkpoint: Path) -> None:
    done = closed_pipe(f"from omniw4.cli.app import main; main(['inspect', {str(checkpoint)!r}, '--tensors'])")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
def test_a_pipe_closed_before_the_help_is_no_failed_verdict(arguments: list[str]) -> None:
    done = closed_pipe(f"from omniw4.cli.app import main; main({arguments})")
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_talk_that_nobody_hears_ends_the_work() -> None:
    script = (
        "from omniw4.cli import app; from omniw4.cli.output import Output\n"
        "@app.app.command(name='talk')\n"
        "def talk(): Output().note('hello')\n"
        "app.main(['talk'])"
    )
    done = closed_pipe(script, stream=2)
    assert (done.returncode, done.stdout) == (141, "")


def test_sigterm_ends_like_ctrl_c() -> None:
    script = (
        "import os, signal, omniw4.checkpoint as c; from omniw4.cli.app import main\n"
        "c.summarize = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main(['inspect', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.returncode == 130
    assert done.stderr.startswith("error: interrupted; ")
