"""The GPUs the roofline knows, from ``gpus.yaml``. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from omniw4.errors import UsageError

RATES = ("fp16", "fp8", "int8", "int4")


@dataclass(frozen=True)
class Gpu:
    """One GPU's ceilings.

    ``rates``: 10^12 operations a second by operand type; None where the type is missing or emulated. ``fp32``: the same
    of CUDA cores; None where no data sheet is known.
    ``measured``: the ceilings were reached by real kernels, and are not a data sheet's.
    """

    name: str
    capability: str
    multiprocessors: int
    memory_gbs: float
    l2_mb: float
    rates: dict[str, float | None]
    match: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=())
    measured: bool = False
    fp32: float | None = None

    def ridge(self, rate: str) -> float | None:
        """Operations a byte at which compute takes as long as memory; None without that rate."""
        peak = self.rates.get(rate)
        return peak * 1e3 / self.memory_gbs if peak else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ridge_ops_per_byte": {rate: self.ridge(rate) for rate in RATES}}


@cache
def known() -> dict[str, Gpu]:
    """Every GPU of the data file by its short name."""
    table = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text(encoding="utf-8"))
    return {name: _parse(name, entry) for name, entry in table.items()}


def get(name: str) -> Gpu:
    """A GPU by its short name, case and spaces aside.

    Raises:
        UsageError: none has this name.
    """
    wanted = name.replace(" ", "").replace("-", "").lower()
    for gpu in known().values():
        if gpu.name.lower() == wanted:
            return gpu
    raise UsageError(f"no GPU {name!r} in the table", hint=f"--gpu takes {', '.join(known())} or auto")


def of_device(device_name: str) -> Gpu | None:
    """The entry for a GPU by the name its driver gives it, the longest match first; None when there is none."""
    found = [(len(prefix), gpu) for gpu in known().values() for prefix in gpu.match if device_name.startswith(prefix)]
    # "NVIDIA L40S" starts with "NVIDIA L4" and is another card: what follows a match must not go on with the name
    fits = [(n, gpu) for n, gpu in found if not device_name[n : n + 1].isalnum()]
    return max(fits, key=lambda pair: pair[0])[1] if fits else None


def _parse(name: str, entry: dict[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        capability=entry["capability"],
        multiprocessors=entry["multiprocessors"],
        memory_gbs=float(entry["memory_gbs"]),
        l2_mb=float(entry["l2_mb"]),
        rates={rate: entry[rate] if entry[rate] is None else float(entry[rate]) for rate in RATES},
        match=tuple(entry["match"]),
        sources=tuple(entry["sources"]),
        fp32=float(entry["fp32"]),
    )
