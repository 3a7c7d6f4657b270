"""What the benchmark of OmniVoice found."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One request, or one batch of them: the seconds of each repetition."""

    name: str
    audio_seconds: float  # of all items, as asked for
    seconds: tuple[float, ...]
    decoding: tuple[float, ...]  # of these, in the iterative decoding

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def decoding_median(self) -> float:
        return statistics.median(self.decoding)

    @property
    def rtf(self) -> float:
        return self.median / self.audio_seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "median_seconds": self.median,
            "decoding_seconds": self.decoding_median,
            "rtf": self.rtf,
        }


@dataclass
class OmniVoiceRow:
    """One engine at one batch size."""

    engine: str  # "package", or a back end of the accelerated one
    batch: int
    samples: list[Sample]
    num_step: int = 0
    speedup: float | None = None  # the package's mean RTF at this batch size over this one
    checked: bool = True  # every waveform finite and of the length asked for
    memory_bytes: int | None = None  # allocated on the device while it ran, at most
    start_up: dict[str, Any] = field(default_factory=dict)  # Accelerated.report()
    note: str = ""

    @property
    def mean_rtf(self) -> float | None:
        """All time over all audio; None where nothing ran."""
        if not self.samples:
            return None
        return sum(s.median for s in self.samples) / sum(s.audio_seconds for s in self.samples)

    @property
    def step_ms(self) -> float | None:
        """Milliseconds a step of decoding, mean over samples, what precedes and follows the steps included."""
        if not self.samples or not self.num_step:
            return None
        return sum(s.decoding_median for s in self.samples) / len(self.samples) / self.num_step * 1e3

    def to_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in vars(self).items() if k != "samples"}
        samples = [sample.to_dict() for sample in self.samples]
        return {**plain, "mean_rtf": self.mean_rtf, "step_ms": self.step_ms, "samples": samples}
