"""CUDA: the driver, the toolkit, the GPUs, and whether this torch can use them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from omniw4.doctor.check import Check

OLDEST = (8, 0)


def checks() -> list[Check]:
    driver = driver_cuda()
    found = [_driver(driver), _toolkit(), _torch_build(driver)]
    if torch.cuda.is_available():
        found += [_gpu(index) for index in range(torch.cuda.device_count())]
    return found


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version the installed driver speaks; None without a driver. Does not start CUDA."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def nvcc() -> tuple[Path, str] | None:
    """The toolkit's compiler and its version: of CUDA_HOME, of the path, of the usual place, or of PyPI's packages."""
    places = [os.environ.get("CUDA_HOME", ""), str(Path(shutil.which("nvcc") or "").parent.parent), "/usr/local/cuda"]
    candidates = [Path(place) / "bin" / "nvcc" for place in places if place]
    site = Path(torch.__file__).resolve().parents[1]
    candidates += sorted(site.glob("nvidia/cu*/bin/nvcc")) + sorted(site.glob("nvidia/cuda_nvcc/bin/nvcc"))
    for candidate in candidates:
        if not candidate.is_file():
            continue
        try:
            told = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        if match := re.search(r"release (\d+\.\d+)", told):
            return candidate, match[1]
    return None


def _driver(version: tuple[int, int] | None) -> Check:
    if version is None:
        return Check("gpu", "driver", "note", "none: everything runs on the CPU, through exact and slow references")
    return Check("gpu", "driver", "ok", f"CUDA {version[0]}.{version[1]}")


def _toolkit() -> Check:
    found = nvcc()
    if found is None:
        return Check(
            "gpu", "toolkit", "note", "no nvcc", "only for building the kernels: `make kernels` gets one from PyPI"
        )
    return Check("gpu", "toolkit", "ok", f"nvcc {found[1]} ({found[0]})")


def _torch_build(driver: tuple[int, int] | None) -> Check:
    built = torch.version.cuda
    if built is None:
        if driver is None:
            return Check("gpu", "torch build", "note", "CPU only")
        advice = "install torch's CUDA build: https://pytorch.org/get-started/locally"
        return Check("gpu", "torch build", "problem", "CPU only, though there is an NVIDIA driver", advice)
    if driver is None:
        return Check("gpu", "torch build", "note", f"CUDA {built}, no driver here")
    wanted = tuple(map(int, built.split(".")[:2]))
    if wanted[0] > driver[0]:
        told = f"CUDA {built}, newer than the driver's {driver[0]}.{driver[1]}"
        return Check("gpu", "torch build", "problem", told, "update the NVIDIA driver, or install an older torch build")
    if not torch.cuda.is_available():
        advice = "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        return Check("gpu", "torch build", "problem", f"CUDA {built}, and no GPU is visible", advice)
    return Check("gpu", "torch build", "ok", f"CUDA {built}")


def _gpu(index: int) -> Check:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(index)
    found = f"{properties.name}, sm_{capability[0]}{capability[1]}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if capability < OLDEST:
        return Check("gpu", f"cuda:{index}", "problem", found, "sm_80 or newer is needed; use `--device cpu`")
    if free < 0.1 * total:
        return Check("gpu", f"cuda:{index}", "warning", found, "`nvidia-smi` shows who holds the memory")
    return Check("gpu", f"cuda:{index}", "ok", found)
