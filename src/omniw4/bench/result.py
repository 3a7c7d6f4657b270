"""What a benchmark found, and what follows from it by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from omniw4.bench.environment import Environment
from omniw4.bench.linear_rows import Contest, QuantizerRow, summary
from omniw4.bench.omnivoice_rows import OmniVoiceRow
from omniw4.bench.timing import Timing


@dataclass(frozen=True)
class Progress:
    """One case finished: ``stage`` "ceilings", "ops", "model" or "quantize"; ``detail`` names the case."""

    stage: str
    done: int
    total: int
    detail: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Ceiling:
    """What this machine reached in this run: the two lines of the roofline."""

    tops: float  # integer tensor-core products, 10^12 operations a second
    gbs: float  # memory, 10^9 bytes a second
    source: str  # how it was measured


@dataclass(frozen=True)
class OpRow:
    """One op at one shape.

    ``ops`` and ``bytes`` are what the op must do and move at least, by its contract, so TOPS and GB/s are achieved
    rates. ``checked`` says that the output was compared with FP64 before timing; a row that failed has no timing.
    """

    op: str
    m: int
    n: int
    k: int
    rank: int
    act_bits: int
    ops: int
    bytes: int
    path: str  # kernel family that ran; "reference" on a CPU
    checked: bool
    error: float | None = None  # relative error against FP64
    tolerance: float | None = None
    timing: Timing | None = None
    baseline: Timing | None = None  # torch.nn.functional.linear at the same shape in the dtype of the run
    roofline: float | None = None  # share of the ceiling measured in this run; None without one
    note: str = ""

    @property
    def tops(self) -> float | None:
        return self.ops / self.timing.median * 1e-6 if self.timing else None

    @property
    def gbs(self) -> float | None:
        return self.bytes / self.timing.median * 1e-3 if self.timing else None

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / self.bytes

    @property
    def speedup(self) -> float | None:
        """Baseline's median over this median; above 1 is faster than the baseline."""
        return self.baseline.median / self.timing.median if self.timing and self.baseline else None

    def to_dict(self) -> dict[str, Any]:
        derived = {"tops": self.tops, "gbs": self.gbs, "ops_per_byte": self.intensity, "vs_fp16": self.speedup}
        plain = {k: v for k, v in asdict(self).items() if k not in ("timing", "baseline")}
        return {**plain, **derived, "timing": _timing(self.timing), "baseline": _timing(self.baseline)}


@dataclass(frozen=True)
class ModelRow:
    """One whole forward (no cache) of a batch of sequences, quantized against the original."""

    batch: int
    seq_len: int
    mode: str  # "eager", or "graph": captured in one CUDA graph
    path: str
    checked: bool  # outputs finite and of the original's shape
    relative_error: float | None  # ‖ŷ - y‖² / ‖y‖² of the two models' outputs
    quantized: Timing | None = None
    original: Timing | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        return self.original.median / self.quantized.median if self.quantized and self.original else None

    def to_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in asdict(self).items() if k not in ("quantized", "original")}
        timings = {"quantized": _timing(self.quantized), "original": _timing(self.original)}
        return {**plain, "vs_original": self.speedup, **timings}


@dataclass(frozen=True)
class BackboneRow:
    """One way of running one step of the backbone; times are microseconds a step."""

    engine: str
    tokens: int  # P, over all sequences
    bucket: int  # tokens the GPU works on: P, or the bucket it is padded to
    dtype: str
    checked: bool
    # relative: from transformers, or from w16 where activations are quantized; None for a baseline, or when not finite
    error: float | None
    timing: Timing | None
    limit: float | None = None  # up to which the error is taken for right
    speedups: dict[str, float] = field(default_factory=dict)  # median of another row of the same P over this one's
    weight_bytes: int | None = None  # of the layers' linears, as they run
    total_bytes: int | None = None  # of the engine: weights, norms, tables, static buffers, graphs
    start_up_seconds: float | None = None  # packing and capturing, or compiling
    attention: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "timing": _timing(self.timing)}


@dataclass(frozen=True)
class ProcessRow:
    """What one verb cost as a process of its own."""

    what: str  # "calibrate" or "quantize"
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    command: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


PARTS = ("ops", "model", "quantize", "backbone", "omnivoice", "linear", "quantizer")


@dataclass
class BenchResult:
    """Everything ``omniw4 bench`` reports; ``to_dict`` is the document that ``--json`` prints."""

    environment: Environment
    dtype: str
    path: str
    ceiling: Ceiling | None = None
    ops: list[OpRow] = field(default_factory=list)
    model: list[ModelRow] = field(default_factory=list)
    quantize: list[ProcessRow] = field(default_factory=list)
    backbone: list[BackboneRow] = field(default_factory=list)
    omnivoice: list[OmniVoiceRow] = field(default_factory=list)
    linear: list[Contest] = field(default_factory=list)
    quantizer: list[QuantizerRow] = field(default_factory=list)
    hash: str | None = None  # content hash of the checkpoint; None without one
    notes: list[str] = field(default_factory=list)  # what must be said wherever a number of this run is printed

    @property
    def passed(self) -> bool:
        """No output was found wrong before timing."""
        checked = [row.checked for row in self.ops] + [row.checked for row in self.model]
        checked += [row.checked for row in self.linear]
        return all(checked + [row.checked for row in self.backbone] + [row.checked for row in self.omnivoice])

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "environment": self.environment.to_dict(),
            "dtype": self.dtype,
            "path": self.path,
            "hash": self.hash,
            "ceiling": asdict(self.ceiling) if self.ceiling else None,
            "notes": self.notes,
            "summary": summary(self.linear),
            **{part: [row.to_dict() for row in getattr(self, part)] for part in PARTS},
        }


def _timing(timing: Timing | None) -> dict[str, Any] | None:
    return timing.to_dict() if timing else None
