"""The kernels of family wgmma_s8 as compiled, without a GPU: what their disassembly must and must not hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from omniw4.ops import extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_sass
import ptxas_report

CUOBJDUMP = check_sass.find_cuobjdump()
pytestmark = [
    pytest.mark.skipif(bool(extension.why_missing()), reason=f"{extension.why_missing()}; make kernels"),
    pytest.mark.skipif("90a" not in extension.compiled_archs(), reason="the kernels are not built for 90a"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump: pip install nvidia-cuda-cuobjdump"),
]


@cache
def kernels() -> dict[str, int]:
    """Threads a block of every kernel of the family, by name."""
    listed = [k for k in extension.module().kernels() if "gemm::sm90a::" in k["name"]]
    found = {ptxas_report.short_name(k["name"]): k["threads"] for k in listed}
    tiles = extension.module().integer_tiles()
    assert len(found) == 60 + 2 * len(tiles), "2 widths, 3 epilogues, 2 dtypes, 5 tiles; integer scales: 2 dtypes"
    return found


@cache
def disassembly() -> dict[str, Counter[str]]:
    assert CUOBJDUMP is not None
    pattern = r"\bIGMMA\.[\w.]+|\b(?:STL|LDL)\b|USETMAXREG\.[^;]*0x[0-9a-f]+"
    path = Path(extension.module().__file__ or "")
    found = check_sass.instructions(path, "90a", CUOBJDUMP, pattern)
    return {name: found[name] for name in kernels()}


@cache
def launch_registers() -> dict[str, int]:
    """Registers a thread is launched with."""
    assert CUOBJDUMP is not None
    command = [str(CUOBJDUMP), "--dump-resource-usage", "--gpu-architecture", "sm_90a"]
    done = subprocess.run([*command, extension.module().__file__ or ""], capture_output=True, text=True, check=True)
    pairs = re.findall(r"Function (\w+):\s*\n?\s*REG:(\d+)", done.stdout)
    return {ptxas_report.short_name(check_sass.demangle(symbol)): int(count) for symbol, count in pairs}


def test_every_kernel_multiplies_with_wgmma_and_keeps_its_registers() -> None:
    for name, count in disassembly().items():
        assert any(found.startswith("IGMMA") for found in count), f"{name} has no warpgroup product"
        assert not count["STL"] + count["LDL"], f"{name} spills"


def test_warpgroups_ask_for_no_more_registers_than_their_block_has() -> None:
    """A warpgroup that asks for more waits for ever."""
    for name, threads in kernels().items():
        asked = {key.split(".")[1]: int(key.rsplit("0x", 1)[1], 16) for key in disassembly()[name] if "MAXREG" in key}
        assert asked.keys() == {"TRY_ALLOC", "DEALLOC"}, f"{name}: {asked}"
        warpgroups = threads // 128
        needed = asked["DEALLOC"] + (warpgroups - 1) * asked["TRY_ALLOC"]
        assert needed <= warpgroups * launch_registers()[name], f"{name}: {asked}, {launch_registers()[name]} launched"
