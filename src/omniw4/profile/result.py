"""What a profile found. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class KindRow:
    """All kernels of one kind in a step; on a CPU operators take the place of kernels."""

    kind: str
    ms: float
    share: float  # of the busy time
    count: float  # a step
    mean_us: float


@dataclass(frozen=True)
class KernelRow:
    """All calls of one kernel in a step."""

    name: str
    kind: str
    ms: float
    count: float
    mean_us: float


@dataclass(frozen=True)
class Gap:
    """A time in which the device did nothing, and what Python did meanwhile, the innermost frame first."""

    us: float
    after: str  # the kernel before
    before: str  # the kernel behind
    python: tuple[str, ...]


@dataclass(frozen=True)
class EngineProfile:
    """One engine's step.

    ``step_ms`` is measured without the profiler, the median; ``busy_ms`` is the union of the kernels under the
    profiler, whose durations it does not change; ``idle_ms`` is the rest. Gaps are as long as they were under the
    profiler, which slows Python down.
    """

    name: str
    device: str
    step_ms: float
    step_std_ms: float
    busy_ms: float
    kernels: float  # a step
    launches: float  # calls of the driver that start work, a step; one for a whole CUDA graph
    launch_us: float | None  # mean time of such a call on the host; None on a CPU
    breakdown: list[KindRow]
    top: list[KernelRow]
    gaps: list[Gap]
    trace: str | None = None  # file for https://ui.perfetto.dev
    note: str = ""

    @property
    def idle_ms(self) -> float:
        return max(0.0, self.step_ms - self.busy_ms)

    @property
    def idle_share(self) -> float:
        return self.idle_ms / self.step_ms if self.step_ms else 0.0

    @property
    def launch_ms(self) -> float | None:
        """Host time spent in starting work, a step: what a CUDA graph would save at least."""
        return None if self.launch_us is None else self.launches * self.launch_us / 1000

    def to_dict(self) -> dict[str, Any]:
        derived = {"idle_ms": self.idle_ms, "idle_share": self.idle_share, "launch_ms": self.launch_ms}
        return {**asdict(self), **derived}


@dataclass
class ProfileResult:
    """Engines side by side, in one environment."""

    what: str
    environment: dict[str, Any]
    tokens: int
    sequences: int
    steps: int
    engines: list[EngineProfile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hash: str | None = None  # content hash of the checkpoint; None without one

    def speedup(self, index: int) -> float | None:
        """The first engine's step over this one's; None for the first."""
        return self.engines[0].step_ms / self.engines[index].step_ms if index else None

    def to_dict(self) -> dict[str, Any]:
        engines = [{**e.to_dict(), "speedup": self.speedup(i)} for i, e in enumerate(self.engines)]
        return {**{k: v for k, v in vars(self).items() if k != "engines"}, "engines": engines}
