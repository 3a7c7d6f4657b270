"""Memory, disk and cores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from omniw4.doctor.check import Check

LITTLE_MEMORY, LITTLE_DISK = 4 << 30, 5 << 30
_GIB = 2**30


def checks() -> list[Check]:
    return [_cores(), _memory(), *_disks()]


def _cores() -> Check:
    return Check("machine", "cores", "ok", str(len(os.sched_getaffinity(0))))


def available_memory() -> int | None:
    """Bytes that a new process can take without swapping, a control group's limit included; None where unknown."""
    values = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    free = values.get("MemAvailable")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no limit reads "max"
        return free
    return limit - used if free is None else min(free, limit - used)


def _memory() -> Check:
    free = available_memory()
    if free is None:
        return Check("machine", "memory", "note", "unknown")
    found = f"{free / _GIB:.1f} GiB free"
    if free < LITTLE_MEMORY:
        advice = "`omniw4 quantize --dry-run` tells what a model needs"
        return Check("machine", "memory", "warning", found, advice)
    return Check("machine", "memory", "ok", found)


def _disks() -> list[Check]:
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = {"disk here": Path.cwd(), "disk of the Hub's cache": cache}
    found, seen = [], set()
    for name, folder in folders.items():
        while not folder.exists():
            folder = folder.parent
        if (device := folder.stat().st_dev) in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(folder).free
        told = f"{free / _GIB:.1f} GiB free"
        little = free < LITTLE_DISK
        advice = "free some space: a checkpoint takes about a third of its model" if little else ""
        found.append(Check("machine", name, "warning" if little else "ok", told, advice))
    return found
