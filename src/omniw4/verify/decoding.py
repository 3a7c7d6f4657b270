"""What a step-wise comparison of decoding found. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DecodingCheck:
    """Sums over prompts; a step has as many masked codes as all prompts together."""

    num_step: int
    prompts: int = 0
    masked: list[int] = field(default_factory=list)  # by step
    agreed: list[int] = field(default_factory=list)
    kl_sum: float = 0.0
    codes: int = 0
    matched: int = 0
    identical: int = 0  # prompts

    @property
    def agreement(self) -> float:
        """Over all steps, each masked code of a step counting once."""
        return sum(self.agreed) / sum(self.masked)

    @property
    def agreement_by_step(self) -> list[float | None]:
        return [a / m if m else None for a, m in zip(self.agreed, self.masked, strict=True)]

    @property
    def kl(self) -> float:
        """Mean of KL(original ‖ quantized) of the guided distributions, in nats."""
        return self.kl_sum / sum(self.masked)

    @property
    def match(self) -> float:
        return self.matched / self.codes

    def to_dict(self) -> dict[str, Any]:
        names = ("num_step", "prompts", "agreement", "agreement_by_step", "kl", "match", "identical", "codes")
        return {name: getattr(self, name) for name in names}
