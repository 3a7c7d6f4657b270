"""What ``bench --what linear`` finds: every contestant's time at one shape, and what follows from it by arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniw4.bench.timing import Timing

if TYPE_CHECKING:
    from omniw4.bench.result import Ceiling


@dataclass
class Contest:
    """One weight at one number of tokens: microseconds of every contestant.

    ``w4a4``, ``w4a8``: whole linears with integer group scales; ``… fp16 scales``: with FP16 ones; ``… rank 0``:
    without the low-rank branch; ``… product``, ``quantize``: their parts. ``fp16``, ``fp8``, ``int8``: products of
    cuBLAS; ``fp8 quantized``: with the cost of quantizing its activations.
    """

    name: str
    m: int
    n: int
    k: int
    checked: bool = True
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # relative error and tolerance, against FP64
    times: dict[str, Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ceiling: Ceiling | None = None

    def us(self, contestant: str) -> float | None:
        return self.times[contestant].median if contestant in self.times else None

    def ratio(self, ours: str, theirs: str) -> float | None:
        """Their median over ours; above 1, ours is faster."""
        a, b = self.us(ours), self.us(theirs)
        return b / a if a and b else None

    def tops(self, contestant: str) -> float | None:
        us = self.us(contestant)
        return 2 * self.m * self.n * self.k / us * 1e-6 if us else None

    def roofline(self, contestant: str) -> float | None:
        """Share of the ceiling, for a product of INT8 operands with weights of 4.125 bits."""
        us, ceiling = self.us(contestant), self.ceiling
        if us is None or ceiling is None:
            return None
        moved = self.n * self.k * 33 / 64 + self.m * self.k + 2 * self.m * self.n
        return max(2 * self.m * self.n * self.k / ceiling.tops * 1e-6, moved / ceiling.gbs * 1e-3) / us

    def to_dict(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in ("name", "m", "n", "k", "checked", "errors", "notes")},
            "tops": {name: self.tops(name) for name in self.times},
            "roofline": {name: self.roofline(name) for name in ("w4a4 product", "w4a8 product")},
            "times": {name: timing.to_dict() for name, timing in self.times.items()},
        }


@dataclass
class QuantizerRow:
    """The quantizer beside a copy of as many bytes as it reads and writes."""

    m: int
    k: int
    quantize: Timing
    with_norm: Timing
    copy: Timing

    @property
    def share(self) -> float:
        """Of the copy's bandwidth."""
        return self.copy.median / self.quantize.median

    def to_dict(self) -> dict[str, Any]:
        times = {name: getattr(self, name).to_dict() for name in ("quantize", "with_norm", "copy")}
        return {"m": self.m, "k": self.k, "share_of_copy": self.share, **times}


def summary(rows: Sequence[Contest]) -> dict[str, float]:
    """The figures by which the kernels are judged."""

    def ratios(ours: str, theirs: str) -> list[float]:
        return [ratio for row in rows if (ratio := row.ratio(ours, theirs)) is not None]

    figures = {}
    for ours in ("w4a4", "w4a8", "w4a4 fp16 scales", "w4a8 fp16 scales"):
        for theirs in ("fp16", "fp8 quantized", "fp8", "int8"):
            if found := ratios(ours, theirs):
                figures[f"{ours} over {theirs}, geometric mean"] = statistics.geometric_mean(found)
                figures[f"{ours} over {theirs}, least"] = min(found)
    if share := ratios("w4a4 rank 0", "w4a4"):
        figures["share of the low-rank branch, median"] = 1 - 1 / statistics.median(share)
    return figures
