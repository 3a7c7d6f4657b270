"""Time a step, then trace some, and take the trace apart."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from omniw4.profile import trace
from omniw4.profile.engines import Engine
from omniw4.profile.result import EngineProfile, ProfileResult

STEPS, WARMUP, REPETITIONS = 3, 3, 10
SHOWN_KERNELS, SHOWN_GAPS = 12, 8
OnProgress = Callable[[int, int, str], None]
_NO_LOG = "6"  # above every level of the profiler's own log, which writes its begin and end to stderr otherwise


def run(
    engines: Sequence[Engine],
    *,
    what: str = "backbone",
    device: torch.device | str,
    tokens: int,
    sequences: int = 1,
    steps: int = STEPS,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
    environment: dict[str, Any] | None = None,
    out: Path | None = None,
    on_progress: OnProgress | None = None,
) -> ProfileResult:
    """Profile engines one after the other.

    Args:
        steps: traced steps. repetitions: timed ones, before and without the profiler.
        environment: what describes this machine in the result.
        out: existing folder for the traces, ``trace-NAME.json.gz``; None: none are kept.
    """
    target = torch.device(device)
    result = ProfileResult(what, environment or {}, tokens, sequences, steps)
    if target.type != "cuda":
        result.notes.append("on a CPU: operators take the place of kernels; these numbers say nothing about a GPU")
    for done, engine in enumerate(engines, start=1):
        result.engines.append(profile_engine(engine, target, steps, warmup, repetitions, out))
        result.notes += [engine.note] if engine.note else []
        if on_progress is not None:
            on_progress(done, len(engines), engine.name)
    return result


def profile_engine(
    engine: Engine, device: torch.device, steps: int, warmup: int, repetitions: int, out: Path | None
) -> EngineProfile:
    """One engine: median step without the profiler, then the breakdown of ``steps`` under it."""
    with torch.inference_mode():
        for _ in range(max(1, warmup)):
            engine.step()
        times = [_timed(engine.step, device) for _ in range(max(1, repetitions))]
        with tempfile.TemporaryDirectory(prefix="omniw4-profile-") as scratch:
            name = f"trace-{re.sub(r'[^A-Za-z0-9_.-]+', '-', engine.name)}.json.gz"
            file = (out or Path(scratch)) / name
            _trace(engine.step, device, steps, file)
            events = trace.load(file)
    marks = trace.steps(events)
    on_gpu = device.type == "cuda"
    work = trace.device_work(events) if on_gpu else trace.operator_work(events)
    if marks:
        work = trace.within(work, (marks[0].start, float("inf") if on_gpu else marks[-1].end))
    started = trace.launches(events) if on_gpu else []
    return EngineProfile(
        name=engine.name,
        device=str(device),
        step_ms=statistics.median(times),
        step_std_ms=statistics.stdev(times) if len(times) > 1 else 0.0,
        busy_ms=trace.busy_us(work) / steps / 1000,
        kernels=sum(span.call for span in work) / steps,
        launches=len(started) / steps,
        launch_us=statistics.fmean(span.us for span in started) if started else None,
        breakdown=trace.breakdown(work, steps),
        top=trace.longest_kernels(work, steps, SHOWN_KERNELS),
        gaps=trace.longest_gaps(work, events, SHOWN_GAPS),
        trace=name if out is not None else None,
        note=engine.note,
    )


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one step, the device waited for."""
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return (time.perf_counter() - start) * 1e3


def _trace(step: Callable[[], Any], device: torch.device, steps: int, file: Path) -> None:
    """Steps under the profiler, with Python's frames, written compressed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities, with_stack=True) as profiler:
        for _ in range(steps):
            with record_function(trace.STEP):
                step()
                _wait(device)
    profiler.export_chrome_trace(str(file))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
