"""What a verification found, and the gates that judge it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from omniw4.config import Gates
from omniw4.verify.decoding import DecodingCheck


@dataclass(frozen=True)
class Progress:
    """One step of the work, for a progress bar or a line of log.

    Args:
        stage: ``"structure"``, ``"repack"``, ``"layers"`` or ``"evaluate"``.
        done, total: steps of this stage.
        detail: the layer or window just finished.
        eta_seconds: estimated time left in this stage; None before the first step ended.
    """

    stage: str
    done: int
    total: int
    detail: str = ""
    eta_seconds: float | None = None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Gate:
    """One verdict: ``value`` against ``limit``. ``value`` is None when it could not be measured."""

    name: str
    passed: bool
    value: float | bool | None
    limit: float | bool | None
    relation: str  # "<=", ">=" or "=="
    detail: str = ""


@dataclass(frozen=True)
class LayerCheck:
    """One quantized linear on held-out inputs.

    ``relative_error`` is ``‖ŷ - y‖² / ‖y‖²`` of the quantized linear against the original in FP64, ``sqnr_db`` the
    same in decibels. ``op_error`` is ``‖ŷ - ỹ‖ / ‖ỹ‖`` of the op path against an FP64 evaluation of the same codes,
    ``op_tolerance`` twice what plain torch in that dtype makes. ``rank_95`` is the rank of a low-rank branch that would
    hold 95 % of what the codes miss, ``‖W' - Q‖²`` in the transformed space.
    """

    path: str
    out_features: int
    in_features: int
    tokens: int
    relative_error: float
    sqnr_db: float
    op_error: float
    op_tolerance: float
    effective_bits: float
    finite: bool
    repack_identical: bool | None  # None: not checked
    rank_95: int | None = None  # None: not asked for

    @property
    def op_passed(self) -> bool:
        return self.finite and self.op_error <= self.op_tolerance


@dataclass
class Perplexity:
    """``exp`` of the mean negative log-likelihood; all None, with a reason, for a model without a language head."""

    reference: float | None = None
    quantized: float | None = None
    ratio: float | None = None
    reason: str = ""


@dataclass
class VerifyResult:
    """Everything ``omniw4 verify`` reports; ``to_dict`` is the document that ``--json`` prints."""

    passed: bool
    gates: list[Gate]
    layers: list[LayerCheck]
    perplexity: Perplexity
    kl: float | None  # mean over tokens of KL(reference ‖ quantized), nats
    argmax_agreement: float | None
    effective_bits: float | None  # stored bits per quantized weight, low-rank branch included
    device: str
    path: str  # kernel family that ran; "reference" on a CPU
    hidden_error: float | None = None  # ‖ĥ - h‖² / ‖h‖² of the last hidden state
    decoding: DecodingCheck | None = None  # of prompts; KL and agreement above are then those of decoding
    dtype: str = ""
    hash: str | None = None  # content hash of the checkpoint; None when its structure is broken
    model: dict[str, str] = field(default_factory=dict)  # the original as it was given: name, hash
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # of the beginning
    windows: dict[str, Any] = field(default_factory=dict)  # text hash, count, length, token starts, hash of the ids
    bos: dict[str, Any] = field(default_factory=dict)  # policy at calibration, at evaluation, and whether they agree
    warnings: list[str] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed_gates(self) -> list[Gate]:
        return [gate for gate in self.gates if not gate.passed]

    def to_dict(self) -> dict[str, Any]:
        """A plain, JSON-safe dict: numbers that are not finite become None."""
        decoding = self.decoding.to_dict() if self.decoding else None
        plain: dict[str, Any] = _json_safe({**asdict(self), "decoding": decoding})
        return plain


def at_most(name: str, value: float | None, limit: float | None, detail: str = "") -> list[Gate]:
    """The gate ``value <= limit``; none when no limit is set. A value that is missing or NaN fails."""
    if limit is None:
        return []
    return [Gate(name, value is not None and value <= limit, value, limit, "<=", detail)]


def at_least(name: str, value: float | None, limit: float | None, detail: str = "") -> list[Gate]:
    """The gate ``value >= limit``; none when no limit is set. A value that is missing or NaN fails."""
    if limit is None:
        return []
    return [Gate(name, value is not None and value >= limit, value, limit, ">=", detail)]


def holds(name: str, fact: bool, detail: str = "") -> Gate:
    """A gate that is a plain fact and always applies; ``detail`` says what is wrong."""
    return Gate(name, fact, fact, True, "==", detail)


def judge(
    gates: Gates, perplexity: Perplexity, kl: float | None, agreement: float | None, layers: list[LayerCheck]
) -> list[Gate]:
    """The gates of the config over the measured figures."""
    worst = max(layers, key=lambda layer: _nan_is_worst(layer.relative_error), default=None)
    return [
        *at_most("max_perplexity_ratio", perplexity.ratio, gates.max_perplexity_ratio, perplexity.reason),
        *at_most("max_kl", kl, gates.max_kl),
        *at_least("min_argmax_agreement", agreement, gates.min_argmax_agreement),
        *at_most(
            "max_layer_error",
            worst.relative_error if worst else None,
            gates.max_layer_error,
            f"worst layer {worst.path}" if worst else "no layer was checked",
        ),
    ]


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
