"""How long a callable takes: warm-up, repetitions, median and spread, every raw sample kept.

On a CPU each repetition is timed with ``perf_counter``. On a GPU the calls, one per copy of the weights, are captured
into one CUDA graph, so that launches cost nothing and weights come from memory as in a forward; each replay is timed
between two events and divided by the number of calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from omniw4.cuda_graph import capture

WARMUP = 3
REPETITIONS = 20


@dataclass(frozen=True)
class Timing:
    """Microseconds a call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def std(self) -> float:
        """Standard deviation of the samples; 0 for a single one."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def min(self) -> float:
        return min(self.samples)

    @property
    def max(self) -> float:
        return max(self.samples)

    def to_dict(self) -> dict[str, Any]:
        names = ("median", "mean", "std", "min", "max")
        return {**{f"{name}_us": getattr(self, name) for name in names}, "samples_us": list(asdict(self)["samples"])}


def measure(
    calls: Sequence[Callable[[], Any]],
    device: torch.device | str,
    *,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
) -> Timing:
    """Time the calls (the same work over distinct weights); a sample is the time of all of them over their number.

    Args:
        calls: no arguments; on a CUDA device they must be capturable (static shapes, no host synchronisation).
        device: where they run.
        warmup: untimed rounds first.
        repetitions: timed rounds.
    """
    if torch.device(device).type == "cuda":
        return _measure_cuda(calls, torch.device(device), warmup, repetitions)
    return _measure_cpu(calls, warmup, repetitions)


def _measure_cpu(calls: Sequence[Callable[[], Any]], warmup: int, repetitions: int) -> Timing:
    for _ in range(warmup):
        for call in calls:
            call()
    samples = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - start) / len(calls) * 1e6)
    return Timing(tuple(samples))


def _measure_cuda(calls: Sequence[Callable[[], Any]], device: torch.device, warmup: int, repetitions: int) -> Timing:
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            for call in calls:
                call()
        for _ in range(warmup):
            graph.replay()
        return Timing(tuple(_between_events(graph.replay) / len(calls) for _ in range(repetitions)))


def measure_eager(
    calls: Sequence[Callable[[], Any]],
    device: torch.device | str,
    *,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
) -> Timing:
    """As :func:`measure` on a CUDA device, but without a graph: launches and the host's work are in the time."""
    with torch.cuda.device(device):
        for _ in range(warmup):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return Timing(
            tuple(_between_events(lambda: [call() for call in calls]) / len(calls) for _ in range(repetitions))
        )


def _between_events(work: Callable[[], Any]) -> float:
    """Microseconds between two events around ``work`` on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
