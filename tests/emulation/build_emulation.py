"""Compile the kernels of family wgmma_s8 for the CPU, their PTX instructions emulated. Needs g++, pybind11 and CUDA's
headers; the result is kept under ``build/emulation`` until a source changes."""

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
FOLDERS = ("common", "gemm_lora_up", "quantize_lora_down")
# What a host compiler cannot read: shared memory whose size the launch gives
DYNAMIC_SHARED = (
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


def load() -> ModuleType:
    """The module, compiled if it is not."""
    sources = [*sorted(HERE.rglob("*.c*")), *sorted(HERE.rglob("*.h")), *_kernel_sources()]
    text = b"\0".join(path.read_bytes() for path in sources)
    folder = BUILD / hashlib.sha256(text).hexdigest()[:16]
    target = folder / f"emulated_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        if not target.is_file():
            for stale in BUILD.glob("????????????????"):
                shutil.rmtree(stale)
            _compile(folder, target)
    spec = importlib.util.spec_from_file_location("emulated_kernels", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(folder: Path, target: Path) -> None:
    import pybind11

    for source in _kernel_sources():
        place = folder / source.relative_to(ROOT / "kernels")
        place.parent.mkdir(parents=True, exist_ok=True)
        code = source.read_text(encoding="utf-8")
        for pattern, replacement in DYNAMIC_SHARED:
            code = re.sub(pattern, replacement, code)
        place.write_text(code, encoding="utf-8")
    for name in ("ptx", "common"):
        shutil.copytree(HERE / name, folder / name, dirs_exist_ok=True)
    include = [folder, HERE, *_cuda_headers(), Path(pybind11.get_include()), Path(sysconfig.get_paths()["include"])]
    command = ["g++", "-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    command += ["-include", "emulator.h", *(f"-I{path}" for path in include)]
    command += [str(HERE / "emulator.cpp"), str(HERE / "module.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the emulation does not compile:\n{done.stderr[-3000:]}"


def _kernel_sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / "kernels" / folder).iterdir()]
    return sorted(path for path in [*found, ROOT / "kernels" / "omniw4.h"] if path.suffix in (".h", ".cuh"))


def _cuda_headers() -> list[Path]:
    import build_kernels

    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    packages = [path for path in sorted(site.glob("*/include")) if (path / "cuda_fp16.h").is_file()]
    try:
        return [*build_kernels.find_toolchain().include, *packages]
    except build_kernels.BuildError:
        return packages
