"""Read what ``ptxas -v`` says of each kernel, work out its occupancy, and print both as a table."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: begin (scripts/build_kernels.py --table) -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor shares out among blocks (CUDA C++ programming guide, technical specifications)."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


MULTIPROCESSORS = {
    "80": Multiprocessor(64, 32, 164 * 1024),
    "86": Multiprocessor(48, 16, 100 * 1024),
    "89": Multiprocessor(48, 24, 100 * 1024),
    "90a": Multiprocessor(64, 32, 228 * 1024),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one architecture; ``threads`` is 0 until the launch is known."""

    name: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    threads: int = 0
    blocks: int = 0  # that one multiprocessor holds at a time

    @property
    def occupancy(self) -> float:
        """Share of the multiprocessor's warps that can be resident."""
        return self.blocks * self.threads / 32 / MULTIPROCESSORS[self.arch].warps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "occupancy": round(self.occupancy, 3) if self.threads else None}


_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<arch>\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse(log: str) -> list[Kernel]:
    """Every kernel of a log; raises ValueError on an entry whose figures are missing, so that no spill goes unseen."""
    kernels = []
    entries = list(_ENTRY.finditer(log))
    for entry, after in zip(entries, [*entries[1:], None][: len(entries)], strict=True):
        block = log[entry.end() : after.start() if after else len(log)]
        stack, used = _STACK.search(block), _USED.search(block)
        if stack is None or used is None:
            raise ValueError(f"ptxas says nothing of registers or spills of {entry['symbol']} for sm_{entry['arch']}")
        shared = _SHARED.search(block)
        kernels.append(
            Kernel(
                name=short_name(demangle(entry["symbol"])),
                arch=entry["arch"],
                registers=int(used[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=int(stack[1]),
                spill_stores=int(stack[2]),
                spill_loads=int(stack[3]),
            )
        )
    return kernels


def demangle(symbol: str) -> str:
    """C++ name of a symbol; the symbol itself where the C++ runtime is not to be found."""
    try:
        function = ctypes.CDLL(ctypes.util.find_library("stdc++") or "libstdc++.so.6").__cxa_demangle
    except OSError:
        return symbol
    function.restype = ctypes.c_char_p
    status = ctypes.c_int()
    name = function(symbol.encode(), None, None, ctypes.byref(status))  # leaks a few bytes; a build ends soon
    return name.decode() if status.value == 0 and name else symbol


def short_name(spelled: str) -> str:
    """A demangled name, or the compiler's ``[with auto kernel = ...]``, to the kernel and its template arguments."""
    name = spelled.split(" = ", 1)[1].rsplit("]", 1)[0] if "[with " in spelled else spelled
    name = re.sub(r"\(anonymous namespace\)::|\{anonymous\}::|<unnamed>::|\b\w+::", "", name)
    name = re.sub(r"\((int|bool)\)", "", name)
    start = name.index("_kernel") if "_kernel" in name else 0
    head = re.split(r"[\s&*]", name[:start])[-1]
    tail, depth = "", 0
    for character in name[start:]:
        depth += (character == "<") - (character == ">")
        if depth == 0 and character in "(;":
            break
        tail += character
    name = (head + tail).replace("_kernel", "").strip()
    return re.sub(r"\s*,\s*", ", ", name.replace("__nv_bfloat16", "bf16").replace("__half", "f16"))


def with_launch(kernel: Kernel, launch: Mapping[str, Any] | None) -> Kernel:
    """The kernel with its threads, its dynamic shared memory and the blocks a multiprocessor holds."""
    if launch is None:
        raise ValueError(f"{kernel.name} is compiled but not in the module's list of kernels")
    shared = kernel.shared_bytes + launch["dynamic_shared_bytes"]
    threads = launch["threads"]
    return replace(
        kernel,
        threads=threads,
        shared_bytes=shared,
        blocks=resident_blocks(kernel.arch, kernel.registers, shared, threads),
    )


def resident_blocks(arch: str, registers: int, shared_bytes: int, threads: int) -> int:
    """Blocks one multiprocessor holds: warps take registers in units of 256 and in fours, blocks shared memory in
    units of 128 bytes and 1 KiB more than they ask for (CUDA occupancy calculator)."""
    limits = MULTIPROCESSORS[arch]
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = limits.registers // per_warp // 4 * 4 // warps
    by_shared = limits.shared_bytes // (-(-shared_bytes // 128) * 128 + 1024)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def table(kernels: list[Kernel]) -> str:
    """Markdown: a row a kernel, one cell an architecture."""
    archs = [arch for arch in MULTIPROCESSORS if any(k.arch == arch for k in kernels)]
    by_name: dict[str, dict[str, Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, {})[kernel.arch] = kernel
    lines = [
        "| kernel | threads | shared KiB | " + " | ".join(f"sm_{a}" for a in archs) + " |",
        "|---|---|---|" + "---|" * len(archs),
    ]
    for name, per_arch in sorted(by_name.items()):
        one = next(iter(per_arch.values()))
        cells = []
        for arch in archs:
            k = per_arch.get(arch)
            cells.append(f"{k.registers} · {k.spill_stores} · {k.blocks} ({k.occupancy:.0%})" if k else "")
        lines.append(f"| `{name}` | {one.threads} | {one.shared_bytes / 1024:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(page: Path, kernels: list[Kernel]) -> None:
    """Replace what stands between the two markers of a page."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no markers {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{table(kernels)}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
