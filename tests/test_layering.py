"""Imports point down only (docs/architecture.md), in Python and in C++."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "omniw4"
KERNELS = ROOT / "kernels"

# From the bottom up. A unit may import every tier below its own; inside a tier marked open, its neighbours too.
TIERS: list[tuple[set[str], bool]] = [
    ({"errors", "config", "patterns", "_ext"}, True),
    ({"int4", "hadamard", "tensors", "products"}, True),
    ({"storage", "model", "cuda_graph", "ops"}, True),
    ({"calibrate", "quantize", "distill", "checkpoint", "repack"}, False),
    ({"runtime"}, False),
    ({"verify", "bench", "profile", "roofline", "report", "doctor"}, False),
    ({"cli"}, False),
]
TIER_OF = {unit: rank for rank, (units, _) in enumerate(TIERS) for unit in units}


def imported_units(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, unit) for every import of an omniw4 unit, lazy ones and those under TYPE_CHECKING included.

    Args:
        package: the package the source lies in, such as ``omniw4.cli``, to resolve relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            unit = rest.partition(".")[0]
            if top == "omniw4" and unit and unit not in {"__version__", "configs"}:
                yield node.lineno, unit


def violations(unit: str, source: str, package: str) -> list[str]:
    """Sentences, one for each import that does not point down."""
    rank = TIER_OF[unit]
    found = []
    for line, other in imported_units(source, package):
        if other == unit:
            continue
        if other not in TIER_OF:
            found.append(f"line {line}: {unit} imports {other}, which has no tier")
        elif TIER_OF[other] > rank or (TIER_OF[other] == rank and not TIERS[rank][1]):
            found.append(f"line {line}: {unit} must not import {other}")
    return found


def sources() -> list[Path]:
    return [
        p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in {"__init__.py", "__main__.py"} or p.parent != PACKAGE
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    unit = relative.parts[0].removesuffix(".py")
    assert unit in TIER_OF, f"{unit} has no tier: give it one here and in docs/architecture.md"
    package = ".".join(["omniw4", *relative.parts[:-1]])
    found = violations(unit, path.read_text(encoding="utf-8"), package)
    assert not found, f"{relative}: " + "; ".join(found)


@pytest.mark.parametrize(
    ("unit", "package", "source", "bad"),
    [
        ("quantize", "omniw4.quantize", "from omniw4.calibrate import stats", True),
        ("quantize", "omniw4.quantize", "from omniw4 import checkpoint", True),
        ("quantize", "omniw4.quantize", "import omniw4.checkpoint.writer", True),
        ("quantize", "omniw4.quantize", "from ..runtime import linear", True),
        ("quantize", "omniw4.quantize", "def f():\n    from omniw4.cli.output import talk", True),
        ("config", "omniw4", "from .tensors import LinearSpec", True),
        ("ops", "omniw4.ops", "from omniw4 import mystery", True),
        ("ops", "omniw4.ops", "from omniw4.repack import layouts", True),
        ("quantize", "omniw4.quantize", "from omniw4 import ops", False),
        ("quantize", "omniw4.quantize", "from omniw4.quantize import gptq\nfrom . import smooth", False),
        ("quantize", "omniw4.quantize", "from omniw4 import __version__, int4\nimport torch", False),
        ("tensors", "omniw4", "from omniw4.hadamard import hadamard64", False),
        ("cli", "omniw4.cli", "from omniw4.verify import run\nfrom omniw4 import config", False),
    ],
)
def test_the_rule_itself(unit: str, package: str, source: str, bad: bool) -> None:
    assert bool(violations(unit, source, package)) is bad


@pytest.mark.parametrize("module", ["omniw4", "omniw4.errors", "omniw4.config", "omniw4.patterns", "omniw4.cli.app"])
def test_light_modules_stay_light(module: str) -> None:
    """`omniw4 --help` and config errors must not wait for torch."""
    script = (
        f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'datasets', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def kernel_sources() -> list[Path]:
    return sorted(p for p in KERNELS.rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".hpp", ".cpp"})


@pytest.mark.parametrize("path", kernel_sources(), ids=lambda p: str(p.relative_to(KERNELS)))
def test_includes_point_down(path: Path) -> None:
    """ptx < common < <op>; no torch header anywhere; only the binding knows pybind11."""
    relative = path.relative_to(KERNELS)
    place = relative.parts[0] if len(relative.parts) > 1 else ""
    for header in INCLUDE.findall(path.read_text(encoding="utf-8")):
        assert not re.match(r"(torch|ATen|c10)/", header), f"{relative} includes {header}"
        if header.startswith("pybind11/"):
            assert relative.name == "bindings.cpp", f"{relative} includes {header}"
        if place == "ptx":
            assert "common/" not in header, f"{relative} includes {header}"
        if place in {"ptx", "common"}:
            target = (path.parent / header).resolve()
            target = target if target.is_file() else (KERNELS / header).resolve()
            if target.is_file() and target.is_relative_to(KERNELS) and len(target.relative_to(KERNELS).parts) > 1:
                assert target.relative_to(KERNELS).parts[0] in {"ptx", place}, f"{relative} includes {header}"
