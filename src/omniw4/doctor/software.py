"""Versions of Python and of the packages: what is installed against what pyproject.toml asks for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import platform
import re
import sys
import warnings

from omniw4.doctor.check import Check

PYTHON = (3, 11)
REQUIRED = {"torch": "2.11", "transformers": "5", "safetensors": "0.5", "numpy": "2", "pydantic": "2.7"}
BELOW = {"transformers": "6"}
OPTIONAL = {
    "matplotlib": ("plots of `omniw4 report`", "pip install 'omniw4[report]'"),
    "gguf": ("models in .gguf files", "pip install 'omniw4[gguf]'"),
    "datasets": ("text from the Hub", "pip install 'omniw4[datasets]'"),
    "omnivoice": ("OmniVoice models", "pip install omnivoice"),
}


def checks() -> list[Check]:
    return [
        _python(),
        _platform(),
        *(_required(name, least) for name, least in REQUIRED.items()),
        *(_omnivoice() if name == "omnivoice" else _extra(name) for name in OPTIONAL),
    ]


def at_least(version: str, least: str) -> bool:
    """Whether ``2.13.0+cpu`` is 2.11 or newer; letters after the numbers do not count."""
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _python() -> Check:
    found = platform.python_version()
    if sys.version_info[:2] >= PYTHON:
        return Check("software", "Python", "ok", found)
    wanted = ".".join(map(str, PYTHON))
    return Check("software", "Python", "problem", found, f"install Python {wanted} or newer")


def _platform() -> Check:
    found = f"{platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Check("software", "platform", "ok", found)
    return Check("software", "platform", "warning", found, "only Linux on x86-64 is tested")


def _required(name: str, least: str) -> Check:
    version = _version(name)
    below = BELOW.get(name)
    wanted = f"{least} or newer" + (f", below {below}" if below else "")
    pin = f"{name}>={least}" + (f",<{below}" if below else "")
    if version is None:
        return Check("software", name, "problem", "not installed", f"pip install '{pin}'")
    if not at_least(version, least) or (below and at_least(version, below)):
        return Check("software", name, "problem", f"{version}, wanted {wanted}", f"pip install '{pin}'")
    return Check("software", name, "ok", version)


def _extra(name: str) -> Check:
    purpose, install = OPTIONAL[name]
    version = _version(name)
    if version is None:
        return Check("software", name, "note", f"not installed: no {purpose}", install)
    return Check("software", name, "ok", version)


def _omnivoice() -> Check:
    """Installed is not enough: it imports packages that it may have been installed without."""
    found = _extra("omnivoice")
    if found.status != "ok" or importlib.util.find_spec("torch") is None:
        return found
    from omniw4.model.omnivoice import install_hint

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module("omnivoice.models.omnivoice")
    except Exception as e:  # a library of another build than torch's raises OSError, or what it likes
        told = f"{found.found}, and cannot be imported: {' '.join(str(e).split())[:160]}"
        return Check("software", "omnivoice", "warning", told, install_hint(e))
    return found


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
