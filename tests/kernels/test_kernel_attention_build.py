"""The attention kernels as compiled, without a GPU: what their disassembly must and must not hold."""

from __future__ import annotations

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
KERNELS = [f"attention_varlen_sm90a<{dtype}, {head_dim}, 64>" for dtype in ("f16", "bf16") for head_dim in (64, 128)]


@cache
def disassembly() -> dict[str, Counter[str]]:
    assert CUOBJDUMP is not None
    pattern = r"\bHGMMA\.[\w.]+|\b(?:STL|LDL|UTMALDG)\b|WARPGROUP\.DEPBAR"
    return check_sass.instructions(Path(extension.module().__file__ or ""), "90a", CUOBJDUMP, pattern)


def test_all_are_listed() -> None:
    listed = {ptxas_report.short_name(kernel["name"]) for kernel in extension.module().kernels()}
    assert listed >= set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_products_are_wgmma_and_no_register_is_spilled(name: str) -> None:
    found, head_dim = disassembly()[name], int(name.split(", ")[1])
    products = sum(count for instruction, count in found.items() if instruction.startswith("HGMMA"))
    # scores in three places (first, unmasked and masked tiles), head_dim/16 steps each; values in three, 64/16 steps
    assert products >= 3 * (head_dim // 16) + 3 * 4
    assert found["UTMALDG"] > 0
    assert not found["STL"] + found["LDL"]


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_waits_only_where_it_is_told_to(name: str) -> None:
    """One wait after the first scores, two a tile in both loops, one after the last values: more, and the compiler has
    put products one after the other."""
    assert disassembly()[name]["WARPGROUP.DEPBAR"] == 6
