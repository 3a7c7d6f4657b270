"""What an installed wheel holds: every package, the configs, the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel built from a copy of the sources."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("src", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", work, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site")
    return work / "site"


def test_every_module_is_there(installed: Path) -> None:
    sources = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "omniw4").rglob("*.py")}
    packed = {p.relative_to(installed) for p in (installed / "omniw4").rglob("*.py")}
    assert sources - packed == set(), "a package without __init__.py is not found by setuptools"


def test_data_files_are_there(installed: Path) -> None:
    for name in ("roofline/gpus.yaml", "report/page.css"):
        assert (installed / "omniw4" / name).read_bytes() == (ROOT / "src" / "omniw4" / name).read_bytes()


def test_configs_are_there_and_found(installed: Path) -> None:
    shipped = {p.name for p in (ROOT / "configs").glob("*.yaml")}
    assert {p.name for p in (installed / "omniw4" / "configs").glob("*.yaml")} == shipped
    script = "from omniw4 import config; print(config.config_dir()); print(config.load('seed').recipe.rotation)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.stdout.split() == [str(installed / "omniw4" / "configs"), "none"]


def test_the_command_is_declared(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "omniw4 = omniw4.__main__:main" in entry_points.read_text(encoding="utf-8")
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    for requirement in ("torch>=2.11", "transformers<6,>=5"):
        assert f"Requires-Dist: {requirement}\n" in text


def test_every_dependency_is_pinned_for_the_two_commands() -> None:
    """`make install` and `make kernels` install nothing whose version is not in constraints.txt."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    wanted = {canonicalize_name(r.name): r for r in map(Requirement, texts) if r.name != "omniw4"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in pins}
    assert wanted.keys() - pinned.keys() == set()
    unfit = {name: pinned[name] for name, r in wanted.items() if not r.specifier.contains(pinned[name])}
    assert unfit == {}, "pinned outside the range that pyproject.toml allows"
