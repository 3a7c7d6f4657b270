"""Find and load the compiled kernels, module ``w4a4ops``; say what is missing where they cannot run."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from types import ModuleType

import torch

from omniw4.errors import KernelError, UnsupportedGPUError

_HINT = "build them with `make kernels` (or `python scripts/build_kernels.py`); needs nvcc, no GPU"


@cache
def _import() -> tuple[ModuleType | None, str]:
    for name in ("omniw4._ext.w4a4ops", "w4a4ops"):
        try:
            return importlib.import_module(name), ""
        except ModuleNotFoundError:
            continue
        except ImportError as e:
            return None, f"the compiled kernels do not load ({e})"
    return None, "the compiled kernels are not built"


def why_missing() -> str:
    """Why the module cannot be imported; empty when it can."""
    return _import()[1]


def module() -> ModuleType:
    """The module, whatever GPU there is, or none.

    Raises:
        KernelError: it is not built, or does not load.
    """
    found, reason = _import()
    if found is None:
        raise KernelError(reason, hint=_HINT)
    return found


def compiled_archs() -> tuple[str, ...]:
    """What is compiled in, such as ``("80", "86", "89", "90a", "89+ptx")``; empty without the module. PTX is what a
    driver compiles for GPUs newer than it, when the kernels are first loaded."""
    found, _ = _import()
    return () if found is None else tuple(found.archs.split())


def runs_on(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Whether a GPU executes code for one of these architectures: the same one, or (without the suffix that ties code
    to one GPU) an older one of the same major version; or PTX of any older one."""
    major, minor = capability
    for arch in archs:
        name, _, ptx = arch.partition("+")
        digits = name.rstrip("abcdf")
        compiled = int(digits[:-1]), int(digits[-1])
        if ptx and compiled <= (major, minor):
            return True
        if compiled == (major, minor) or (digits == arch and compiled[0] == major and compiled[1] <= minor):
            return True
    return False


def told(archs: tuple[str, ...]) -> str:
    """The architectures in words: ``sm_80, sm_90a and as PTX of 8.0 for newer ones``."""
    native = ", ".join(f"sm_{arch}" for arch in archs if "+" not in arch)
    ptx = [arch.partition("+")[0] for arch in archs if "+" in arch]
    return native + "".join(f" and as PTX of {arch[:-1]}.{arch[-1]} for newer ones" for arch in ptx)


def compiled_as_ptx(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Whether a GPU runs what the driver makes of PTX, no code being compiled for it."""
    native = tuple(arch for arch in archs if "+" not in arch)
    return runs_on(capability, archs) and not runs_on(capability, native)


def why_not_on(device: torch.device) -> str:
    """Why the kernels cannot run on a device; empty when they can."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, found {device}"
    if reason := why_missing():
        return reason
    capability = torch.cuda.get_device_capability(device)
    if not runs_on(capability, compiled_archs()):
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"the kernels are compiled for {told(compiled_archs())}, {name} has compute capability {major}.{minor}"
    return ""


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernels run on a CUDA device; says once, as a warning, when they do not and the reference must."""
    reason = why_not_on(device)
    if reason:
        warnings.warn(f"{reason}: the slow reference in plain torch runs instead", RuntimeWarning, stacklevel=3)
    return not reason


@cache
def loaded(device: torch.device) -> ModuleType:
    """The module with every kernel loaded onto a device, so that no graph capture has to.

    Args:
        device: with an index.

    Raises:
        KernelError: the kernels are missing. UnsupportedGPUError: none is compiled for this GPU.
    """
    found = module()
    if reason := why_not_on(device):
        raise UnsupportedGPUError(
            reason, hint="compile for it with OMNIW4_CUDA_ARCHS; sm_80 and newer are supported, sm_90 as 90a"
        )
    try:
        found.load(device=device.index)
    except RuntimeError as e:
        raise KernelError(f"the kernels do not load on {device}: {e}") from e
    return found
