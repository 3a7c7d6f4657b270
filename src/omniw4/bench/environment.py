"""What a measurement ran on: without it no number can be compared."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import omniw4


@dataclass(frozen=True)
class Environment:
    """The environment line of a benchmark."""

    device: str  # name of the GPU, or of the CPU
    device_type: str  # "cuda" or "cpu"
    capability: str | None  # "sm90"
    threads: int
    clocks: str | None  # SM and memory clock as nvidia-smi tells them; None where it does not
    cuda: str | None
    torch: str
    python: str
    omniw4: str
    commit: str | None  # of the checkout the package runs from; None when installed
    warmup: int
    repetitions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for above the table."""
        where = self.device + (f" ({self.capability})" if self.capability else f" ({self.threads} threads)")
        parts = [
            f"omniw4 {self.omniw4}" + (f" @{self.commit}" if self.commit else ""),
            where,
            f"clocks {self.clocks}" if self.clocks else "",
            f"CUDA {self.cuda}" if self.cuda else "",
            f"torch {self.torch}",
            f"{self.repetitions} repetitions after {self.warmup}",
        ]
        return " · ".join(part for part in parts if part)


def environment(device: torch.device | str, *, warmup: int, repetitions: int) -> Environment:
    """Describe this machine; nothing in it raises when a tool is missing."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    capability = None
    if on_gpu:
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"sm{major}{minor}"
    return Environment(
        device=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        device_type=device.type,
        capability=capability,
        threads=torch.get_num_threads(),
        clocks=_gpu_clocks(device) if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
        torch=torch.__version__,
        python=platform.python_version(),
        omniw4=omniw4.__version__,
        commit=_commit(),
        warmup=warmup,
        repetitions=repetitions,
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _gpu_clocks(device: torch.device) -> str | None:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    told = _tell([*query, f"--id=GPU-{uuid}"]) or _tell(query)
    return told.splitlines()[0].replace(", ", " / ") if told else None


def _commit() -> str | None:
    """Short commit of the checkout that holds this package, with ``+`` when it has uncommitted changes."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    commit = _tell(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
    if commit is None:
        return None
    changed = _tell(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit + ("+" if changed else "")


def _tell(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
