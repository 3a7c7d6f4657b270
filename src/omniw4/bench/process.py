"""Wall time and peak memory of the offline verbs, each run as a process of its own, the way a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from omniw4.bench.result import OnProgress, ProcessRow, Progress
from omniw4.errors import OmniW4Error
from omniw4.storage import explain_os_errors

_MAIN = "import sys; from omniw4.cli.app import main; sys.exit(main())"
# Linux counts into the peak of a new process what its parent held when it was forked. So the command is not a child
# of this process, which may hold a model, but of a small one between them.
_LAUNCHER = """
import os, sys, time
start = time.perf_counter()
null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[null])
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def bench_quantize(
    model: str,
    *,
    calibrate: list[str],
    quantize: list[str],
    workdir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> list[ProcessRow]:
    """Calibrate and quantize a model into a temporary folder.

    Args:
        model: folder or Hub name.
        calibrate, quantize: further flags of the two verbs, such as ``["--samples", "32"]``.
        workdir: where the temporary folder is made; the system's when None.

    Raises:
        StorageError: no folder can be made there.
        OmniW4Error: a verb failed; the message ends with its last line on stderr.
    """
    rows = []
    with explain_os_errors("make a folder in", workdir or Path(tempfile.gettempdir())):
        temporary = tempfile.TemporaryDirectory(prefix="omniw4-bench-", dir=workdir)
    with temporary as folder:
        stats, out = str(Path(folder) / "stats"), str(Path(folder) / "out")
        verbs = {
            "calibrate": ["calibrate", model, "--out", stats, *calibrate],
            "quantize": ["quantize", model, "--stats", stats, "--out", out, *quantize],
        }
        for done, (name, arguments) in enumerate(verbs.items(), start=1):
            shown = ("omniw4", *(a.replace(folder, "TMP") for a in arguments))
            rows.append(measure_process(name, [sys.executable, "-c", _MAIN, *arguments], shown))
            if on_progress is not None:
                on_progress(Progress("quantize", done, len(verbs), name))
    return rows


def measure_process(what: str, command: list[str], shown: tuple[str, ...] = ()) -> ProcessRow:
    """Run a command to its end; wall and CPU time, and the peak resident memory that the kernel counted for it.

    Raises:
        OmniW4Error: it ended with another exit code than 0.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _LAUNCHER, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        told, errors = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise OmniW4Error(
            f"cannot start {command[0]!r}: {errors.strip().splitlines()[-1]}", hint="install omniw4 with pip"
        )
    code, seconds, cpu_seconds, peak = told.split()
    if int(code):
        lines = [line for line in errors.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "nothing on stderr")
        hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint:")), "")
        raise OmniW4Error(
            f"{what} ended with exit code {code}: {said.removeprefix('error: ')}",
            hint=hint or f"run it by itself: {' '.join(shown or tuple(command))}",
        )
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB, on macOS in bytes
    return ProcessRow(what, float(seconds), float(cpu_seconds), int(peak) * unit, shown or tuple(command))
