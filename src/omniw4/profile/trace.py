"""A trace of torch's profiler (Chrome's trace event format) as spans, and what they add up to. Imports no torch.

Times are microseconds. Events used: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` (the device), ``cuda_runtime`` and
``cuda_driver`` (the host starting work), ``cpu_op`` (operators, where there is no device), ``python_function``
(frames), and the ``user_annotation`` that marks each step.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from omniw4.profile.kinds import kind_of
from omniw4.profile.result import Gap, KernelRow, KindRow

STEP = "omniw4.step"
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver"}
_OPAQUE = ("omniw4::", "aten::scaled_dot_product_attention", "aten::scaled_dot_product")
_LAUNCH = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_OWN_FRAMES = re.compile(r"omniw4/(profile|cli)/|torch/profiler/|contextlib\.py|torch/autograd/profiler")

Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """``call``: False for a further piece of a call that was interrupted, so that counts are those of calls."""

    name: str
    start: float
    end: float
    call: bool = True

    @property
    def us(self) -> float:
        return self.end - self.start


def load(path: Path) -> list[Event]:
    """Events of a trace file, compressed or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def steps(events: Iterable[Event]) -> list[Span]:
    """The marked steps, in order."""
    return sorted(_spans(events, {"user_annotation"}, name=STEP), key=lambda span: span.start)


def device_work(events: Iterable[Event]) -> list[Span]:
    """Everything the GPU did; empty on a CPU."""
    return sorted(_spans(events, _DEVICE), key=lambda span: span.start)


def launches(events: Iterable[Event]) -> list[Span]:
    """Calls of the driver that started work on the GPU."""
    return [span for span in _spans(events, _HOST) if _LAUNCH.search(span.name)]


def operator_work(events: Iterable[Event]) -> list[Span]:
    """What operators did themselves, on the thread that ran the steps: where no GPU is, they are the kernels.

    An operator's own time is what is left of it without the operators it calls; the ops of this package, and attention,
    keep the time of theirs. An operator whose time is in pieces gives several spans.
    """
    events = list(events)
    marks = [event for event in events if event.get("name") == STEP and event.get("ph") == "X"]
    threads = {event["tid"] for event in marks}
    operators = _spans([event for event in events if event.get("tid") in threads], {"cpu_op"})
    found = sorted(operators, key=lambda span: (span.start, -span.end))
    work: list[Span] = []
    stack: list[tuple[Span, float, bool]] = []  # operator, end of what is accounted for, whether a piece was written

    def close(until: float) -> None:
        while stack and stack[-1][0].end <= until:
            op, accounted, written = stack.pop()
            if op.end > accounted or not written:
                work.append(Span(op.name, accounted, op.end, call=not written))
            if stack:
                stack[-1] = (stack[-1][0], op.end, stack[-1][2])

    opaque_until = float("-inf")
    for op in found:
        if op.start < opaque_until:
            continue
        close(op.start)
        if stack:
            parent, accounted, written = stack[-1]
            if op.start > accounted:
                work.append(Span(parent.name, accounted, op.start, call=not written))
                written = True
            stack[-1] = (parent, op.start, written)
        if op.name.startswith(_OPAQUE):
            opaque_until = op.end
        stack.append((op, op.start, False))
    close(float("inf"))
    return sorted(work, key=lambda span: span.start)


def within(spans: Iterable[Span], window: tuple[float, float]) -> list[Span]:
    return [span for span in spans if span.start >= window[0] and span.end <= window[1]]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans as one, with the name of the last: what is left between them is idle."""
    union: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        if union and span.start <= union[-1].end:
            last = union[-1]
            union[-1] = Span(span.name if span.end >= last.end else last.name, last.start, max(last.end, span.end))
        else:
            union.append(span)
    return union


def busy_us(spans: Iterable[Span]) -> float:
    return sum(span.us for span in merged(spans))


def breakdown(spans: Sequence[Span], count: int) -> list[KindRow]:
    """Rows by kind, the longest first, a step.

    Args:
        count: steps that the spans are of.
    """
    rows = _grouped(spans, kind_of)
    total = sum(us for us, _ in rows.values()) or 1.0
    return [
        KindRow(kind, us / count / 1000, us / total, calls / count, us / calls if calls else 0.0)
        for kind, (us, calls) in sorted(rows.items(), key=lambda item: -item[1][0])
    ]


def longest_kernels(spans: Sequence[Span], count: int, shown: int) -> list[KernelRow]:
    rows = _grouped(spans, str)
    return [
        KernelRow(name, kind_of(name), us / count / 1000, calls / count, us / calls if calls else 0.0)
        for name, (us, calls) in sorted(rows.items(), key=lambda item: -item[1][0])[:shown]
    ]


def longest_gaps(spans: Sequence[Span], events: Sequence[Event], shown: int) -> list[Gap]:
    """The longest times between two spans of one step, and the frames that Python was in."""
    unions = [merged(within(spans, (step.start, step.end))) for step in steps(events)]
    pairs = [pair for union in unions for pair in pairwise(union)]
    gaps = sorted(pairs, key=lambda pair: pair[0].end - pair[1].start)[:shown]
    frames = sorted(_spans(events, {"python_function"}), key=lambda span: span.start)
    starts = [frame.start for frame in frames]
    found = []
    for before, after in gaps:
        if after.start > before.end:
            python = _python_at(frames, starts, (before.end + after.start) / 2)
            found.append(Gap(after.start - before.end, before.name, after.name, python))
    return found


def _python_at(frames: Sequence[Span], starts: Sequence[float], time: float) -> tuple[str, ...]:
    """The three innermost frames at a time, the module among them, without those of the profiler."""
    active = [frame for frame in frames[: bisect_right(starts, time)] if frame.end >= time]
    names = [_short(frame.name) for frame in reversed(active) if not _OWN_FRAMES.search(frame.name)]
    module = next((name for name in names if name.startswith("nn.Module: ")), None)
    inner = [name for name in names if not name.startswith("nn.Module: ")][:3]
    return tuple([*inner, module] if module else inner)


def _short(frame: str) -> str:
    """A frame's name without the address and the type of a bound object."""
    return re.sub(r" of [\w.]+ object at 0x\w+", "", frame)[:100]


def _spans(events: Iterable[Event], categories: set[str], name: str | None = None) -> list[Span]:
    return [
        Span(e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") in categories and (name is None or e["name"] == name)
    ]


def _grouped(spans: Iterable[Span], key: Callable[[str], str]) -> dict[str, tuple[float, int]]:
    """Microseconds and calls by key of the name."""
    rows: dict[str, tuple[float, int]] = {}
    for span in spans:
        us, calls = rows.get(key(span.name), (0.0, 0))
        rows[key(span.name)] = (us + span.us, calls + span.call)
    return rows
