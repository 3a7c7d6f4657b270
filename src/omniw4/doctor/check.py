"""One finding of the doctor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "problem"]
_ORDER: tuple[Status, ...] = ("ok", "note", "warning", "problem")


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and one line of advice where something can be mended.

    ``status``: "note" is a fact about this machine that limits nothing a user asked for, such as the absence of a GPU;
    "warning" is something slow or missing; "problem" is something that will fail or compute wrong numbers.
    """

    group: str  # "software", "gpu", "kernels" or "machine"
    name: str
    status: Status
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst(checks: Iterable[Check]) -> Status:
    return max((check.status for check in checks), key=_ORDER.index, default="ok")
