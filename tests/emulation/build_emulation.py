"""Compile the kernels of families wgmma_s8 and mma_s8, and round_columns, for the CPU, their PTX instructions emulated.
Needs g++, pybind11 and CUDA's headers; the result is kept under ``build/emulation`` until a source changes."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "emulation"
MODULES = {
    "emulated_kernels": "module.cpp",
    "emulated_mma_s8": "module_mma_s8.cpp",
    "emulated_columns": "module_columns.cpp",
}
FOLDERS = ("common", "gemm_lora_up", "qknorm_rope", "quantize_lora_down", "round_columns")
# What a host compiler cannot read, shared memory whose size the launch gives, and what must lie below 4 GiB as it does
DYNAMIC_SHARED = (
    (
        r"(?:extern )?__shared__ __align__\(128\) uint8_t shared\[\w*\];",
        "uint8_t* shared = emulator::dynamic_shared();",
    ),
    (r"extern __shared__ uint8_t raw\[\];", "uint8_t* raw = emulator::dynamic_shared();"),
    (
        r"extern __shared__ __align__\(\s*16\) float shared\[\];",
        "float* shared = reinterpret_cast<float*>(emulator::dynamic_shared());",
    ),
)

sys.path.insert(0, str(ROOT / "scripts"))


def why_impossible() -> str:
    """What is missing to compile; empty when nothing is."""
    if shutil.which("g++") is None or sys.platform != "linux":
        return "the emulation needs Linux and g++"
    return "" if any((path / "cuda_fp16.h").is_file() for path in _cuda_headers()) else "no CUDA headers"


def load(name: str = "emulated_kernels") -> ModuleType:
    """The module of that name, compiled if it is not."""
    sources = [*sorted(HERE.rglob("*.c*")), *sorted(HERE.rglob("*.h")), *_kernel_sources(name)]
    text = b"\0".join(path.read_bytes() for path in sources)
    folder = BUILD / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        if not target.is_file():
            for stale in BUILD.glob(f"{name}-????????????????"):
                shutil.rmtree(stale)
            _compile(name, folder, target)
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(name: str, folder: Path, target: Path) -> None:
    import pybind11

    for source in _kernel_sources(name):
        place = folder / source.relative_to(ROOT / "kernels")
        place.parent.mkdir(parents=True, exist_ok=True)
        code = source.read_text(encoding="utf-8")
        for pattern, replacement in DYNAMIC_SHARED:
            code = re.sub(pattern, replacement, code)
        place.write_text(code, encoding="utf-8")
    for part in ("ptx", "common"):
        shutil.copytree(HERE / part, folder / part, dirs_exist_ok=True)
    include = [folder, HERE, *_cuda_headers(), Path(pybind11.get_include()), Path(sysconfig.get_paths()["include"])]
    command = ["g++", "-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    command += ["-include", "emulator.h", *(f"-I{path}" for path in include)]
    command += [str(HERE / "emulator.cpp"), str(HERE / MODULES[name]), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the emulation does not compile:\n{done.stderr[-3000:]}"


def _kernel_sources(name: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / "kernels" / folder).iterdir()]
    if name == "emulated_mma_s8":
        found = [path for path in found if "sm90a" not in path.name]
    return sorted(path for path in [*found, ROOT / "kernels" / "omniw4.h"] if _included(path))


def _included(path: Path) -> bool:
    return path.suffix in (".h", ".cuh") or path.name in ("qknorm_rope.cu", "round_columns.cu")


def _cuda_headers() -> list[Path]:
    import build_kernels

    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    packages = [path for path in sorted(site.glob("*/include")) if (path / "cuda_fp16.h").is_file()]
    try:
        return [*build_kernels.find_toolchain().include, *packages]
    except build_kernels.BuildError:
        return packages
