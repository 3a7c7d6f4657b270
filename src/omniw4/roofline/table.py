"""The roofline of a model: a row for each kind of op, times at every width, and the whole forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omniw4.roofline import cost
from omniw4.roofline.cost import WIDTHS, Kernel
from omniw4.roofline.gpu import Gpu
from omniw4.roofline.model import Backbone


@dataclass(frozen=True)
class Time:
    """Microseconds of one op at one width, by the bare roofline and as a real kernel is expected to take."""

    ideal_us: float
    predicted_us: float
    bytes: float
    kernels: int


@dataclass(frozen=True)
class Row:
    """``count`` equal ops. ``ops``, ``bytes``, ``intensity`` and ``bound`` are those of 16 bits."""

    op: str
    kind: str  # "linear", "attention", or "norm" for what only moves memory
    shape: str
    count: int
    ops: float
    bytes: float
    bound: str  # "compute" or "memory"
    times: dict[str, Time | None]  # None: the GPU has no such operands; without kernels: part of another op

    @property
    def intensity(self) -> float:
        return self.ops / self.bytes

    def speedup(self, width: str, *, ideal: bool = False) -> float | None:
        base, time = self.times["fp16"], self.times[width]
        if base is None or time is None or not time.kernels:
            return None
        return base.ideal_us / time.ideal_us if ideal else base.predicted_us / time.predicted_us

    def to_dict(self) -> dict[str, Any]:
        speedups = {width: self.speedup(width) for width in WIDTHS[1:]}
        return {**asdict(self), "intensity": self.intensity, "speedup": speedups}


@dataclass(frozen=True)
class Roofline:
    """Rows at one number of tokens, and their sums."""

    model: str
    gpu: Gpu
    tokens: int
    sequences: int
    causal: bool
    fused: bool
    rows: list[Row] = field(default_factory=list)

    def total_us(self, width: str, *, ideal: bool = False, kind: str = "") -> float | None:
        """Of a forward, in microseconds: every op as often as it occurs."""
        total = 0.0
        for row in self.rows:
            time = row.times[width]
            if kind and row.kind != kind:
                continue
            if time is None:
                return None
            total += row.count * (time.ideal_us if ideal else time.predicted_us)
        return total

    def to_dict(self) -> dict[str, Any]:
        totals = {
            width: {
                "ideal_us": self.total_us(width, ideal=True),
                "predicted_us": self.total_us(width),
                "linears_us": self.total_us(width, kind="linear"),
            }
            for width in WIDTHS
        }
        return {
            "model": self.model,
            "gpu": self.gpu.to_dict(),
            "tokens": self.tokens,
            "sequences": self.sequences,
            "causal": self.causal,
            "fused": self.fused,
            "rows": [row.to_dict() for row in self.rows],
            "total": totals,
        }


def compute(
    backbone: Backbone, gpu: Gpu, tokens: int, *, sequences: int = 1, causal: bool = False, fused: bool = False
) -> Roofline:
    """The roofline of one forward.

    Args:
        tokens: M, of all sequences together.
        sequences: how many equal sequences attention sees.
        causal: attention computes half of the square.
        fused: what a fused engine launches: q, k and v as one linear, gate and up as one, one kernel for q/k-norm and
            rotary embedding, and SwiGLU; at the quantized widths norms and SwiGLU are inside the quantizers behind
            them. Without it rotary embedding and SwiGLU are not counted: they are many kernels, the same at any width.
    """
    if fused:
        backbone = backbone.fused()
    rows = [
        _row(op.name, "linear", f"{tokens}×{op.n}×{op.k}", op.count, gpu,
             {w: cost.linear(gpu, w, tokens, op.n, op.k, op.rank) for w in WIDTHS if cost.supported(gpu, w)})
        for op in backbone.linears
    ]  # fmt: skip
    lengths = [tokens // sequences + (i < tokens % sequences) for i in range(min(sequences, tokens))]
    attention = cost.attention(lengths, backbone.heads, backbone.kv_heads, backbone.head_dim, causal=causal)
    told = f"{len(lengths)}×{max(lengths)} · {backbone.heads}/{backbone.kv_heads} heads of {backbone.head_dim}"
    rows.append(_row("attention", "attention", told, backbone.layers, gpu, _all(gpu, attention)))
    if fused:
        features = (backbone.heads + backbone.kv_heads) * backbone.head_dim
        rows.append(
            _row("q/k-norm, rotary", "norm", f"{tokens}×{features}", backbone.layers, gpu,
                 _all(gpu, cost.rotary(tokens, features)))
        )  # fmt: skip
        for merged in (op for op in backbone.linears if op.name.endswith("gate_up_proj")):
            inner = _all(gpu, cost.swiglu(tokens, merged.n // 2))
            inner |= {width: [] for width in inner if width != "fp16"}
            rows.append(_row("SwiGLU", "norm", f"{tokens}×{merged.n // 2}", merged.count, gpu, inner))
    for norm in backbone.norms:
        kernels = _all(gpu, cost.norm(tokens, norm.width, norm.elements))
        if fused and norm.count >= backbone.layers:
            kernels |= {width: [] for width in kernels if width != "fp16"}
        rows.append(_row(norm.name, "norm", f"{tokens}×{norm.elements}", norm.count, gpu, kernels))
    return Roofline(backbone.name, gpu, tokens, sequences, causal, fused, rows)


def _all(gpu: Gpu, kernels: list[Kernel]) -> dict[str, list[Kernel]]:
    """Attention and norms are computed in 16 bits whatever the width of the linears."""
    return {width: kernels for width in WIDTHS if cost.supported(gpu, width)}


def _row(op: str, kind: str, shape: str, count: int, gpu: Gpu, kernels: Mapping[str, Sequence[Kernel]]) -> Row:
    half = kernels["fp16"]
    work, moved = sum(sum(k.ops.values()) for k in half), sum(k.bytes for k in half)
    compute_us, memory_us = (sum(getattr(k, part)(gpu) for k in half) for part in ("compute_us", "memory_us"))
    times = {
        width: Time(
            sum(k.ideal_us(gpu) for k in kernels[width]),
            sum(k.predicted_us(gpu) for k in kernels[width]),
            sum(k.bytes for k in kernels[width]),
            len(kernels[width]),
        )
        if width in kernels
        else None
        for width in WIDTHS
    }
    return Row(op, kind, shape, count, work, moved, "compute" if compute_us > memory_us else "memory", times)
