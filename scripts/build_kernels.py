"""Compile the CUDA kernels into ``src/omniw4/_ext/w4a4ops*.so``. Needs nvcc, a C++ compiler and pybind11, and no GPU.

nvcc is looked for in $CUDA_HOME/bin, on PATH, in /usr/local/cuda/bin and in the PyPI packages of NVIDIA. Architectures
come from ``--archs`` or OMNIW4_CUDA_ARCHS (default: 80 86 89 90a). Of the newest without a suffix PTX goes in as well,
which a driver compiles for GPUs that are newer than all of them. A file is compiled again only when it, a header or the
command has changed. ptxas' report of registers, shared memory and spills goes to ``build/kernels/report.json``;
a kernel that spills registers fails the build.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ptxas_report

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels"
BUILD = ROOT / "build" / "kernels"
EXTENSION = ROOT / "src" / "omniw4" / "_ext" / f"w4a4ops{sysconfig.get_config_var('EXT_SUFFIX')}"
DEFAULT_ARCHS = "80 86 89 90a"
NO_PTX = "_s4_"  # in the name of a source of family mma_s4, which is for GPUs with INT4 tensor cores
PYPI_HINT = (
    "install CUDA 12.8 or newer, or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm "
    "nvidia-cuda-crt`"
)

# No fused multiply-add behind our back: codes and scales are compared bit for bit. Kernels ask for one by name.
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


class BuildError(Exception):
    """A build that cannot go on; the message is for the user."""


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    include: tuple[Path, ...]
    lib: tuple[Path, ...]
    version: str


def find_toolchain() -> Toolchain:
    """Raises BuildError naming where nvcc was looked for."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    candidates = [root / "bin" / "nvcc" for root in roots]
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc"), *sorted(site.glob("cu*/bin/nvcc"), reverse=True)]
    candidates += [site / "cuda_nvcc" / "bin" / "nvcc"]
    for nvcc in candidates:
        if nvcc.is_file():
            break
    else:
        raise BuildError(f"no nvcc in {', '.join(str(c.parent) for c in candidates)}\n\nhint: {PYPI_HINT}")
    root = toolkit_root(nvcc)
    told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    if told.returncode:
        raise BuildError(f"{nvcc} does not run: {told.stderr.strip() or told.stdout.strip()}")
    version = next((line.split("release ")[1] for line in told.stdout.splitlines() if "release " in line), "unknown")
    include = tuple(p for p in (root / "include", site / "cuda_runtime" / "include") if p.is_dir())
    lib = tuple(p for p in (root / "lib64", root / "lib", site / "cuda_runtime" / "lib") if p.is_dir())
    return Toolchain(nvcc, include, lib, version)


def toolkit_root(nvcc: Path) -> Path:
    """Where the headers and libraries of an nvcc lie: it says so itself, since it may be a wrapper on PATH."""
    told = subprocess.run([str(nvcc), "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    top = next((line.split("TOP=", 1)[1].strip() for line in told.splitlines() if "TOP=" in line), "")
    return Path(top).resolve() if top else nvcc.resolve().parents[1]


def sources(archs: list[str]) -> dict[Path, list[str]]:
    """Every source and the architectures it is compiled for: a suffix ``_sm90a`` means that one alone."""
    found: dict[Path, list[str]] = {}
    for path in sorted([*KERNELS.glob("*/*.cu"), *KERNELS.glob("common/*.cpp")]):
        wanted = [arch for arch in archs if arch == "90a"] if path.stem.endswith("_sm90a") else archs
        if wanted:
            found[path] = wanted
    return found


def ptx_arch(archs: list[str]) -> str:
    """The newest architecture whose PTX later GPUs can run; empty where all are tied to one GPU (``90a``)."""
    return max((arch for arch in archs if arch.isdigit()), key=int, default="")


def told_archs(archs: list[str]) -> str:
    """What the module says it is compiled for: ``80 86 89 90a 89+ptx``."""
    newest = ptx_arch(archs)
    return " ".join([*archs, f"{newest}+ptx"] if newest else archs)


def pybind11_include() -> Path:
    if importlib.util.find_spec("pybind11") is None:
        raise BuildError("the package pybind11 is missing\n\nhint: pip install pybind11")
    import pybind11

    return Path(pybind11.get_include())


def compile_command(tools: Toolchain, source: Path, archs: list[str]) -> list[str]:
    include = [f"-I{path}" for path in tools.include]
    if source.suffix == ".cu":
        newest = "" if NO_PTX in source.stem else ptx_arch(archs)
        codes = {arch: f"[sm_{arch},compute_{arch}]" if arch == newest else f"sm_{arch}" for arch in archs}
        gencode = [f"-gencode=arch=compute_{arch},code={code}" for arch, code in codes.items()]
        return [str(tools.nvcc), *NVCC_FLAGS, *include, *gencode, "-c", str(source)]
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", f'-DOMNIW4_ARCHS="{told_archs(archs)}"']
    if source.name == "bindings.cpp":
        include += [f"-I{pybind11_include()}", f"-I{sysconfig.get_paths()['include']}"]
    return [compiler, *flags, *include, "-c", str(source)]


def compile_one(command: list[str], source: Path, headers: str) -> tuple[Path, str]:
    """Object file and the compiler's messages, from before when nothing has changed. Raises BuildError."""
    text = "\0".join([*command, headers, source.read_text(encoding="utf-8")])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = BUILD / f"{source.stem}-{key}.o"
    log = target.with_suffix(".log")
    if not (target.is_file() and log.is_file()):
        for stale in [
            *BUILD.glob(f"{source.stem}-????????????????.o"),
            *BUILD.glob(f"{source.stem}-????????????????.log"),
        ]:
            stale.unlink()
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        messages = done.stdout + done.stderr
        if done.returncode:
            raise BuildError(f"{source.relative_to(ROOT)} does not compile:\n{messages}")
        log.write_text(messages, encoding="utf-8")
    return target, log.read_text(encoding="utf-8")


def link(tools: Toolchain, objects: list[Path]) -> None:
    """With the CUDA runtime inside, so that the extension loads beside any torch and on machines without CUDA."""
    EXTENSION.parent.mkdir(parents=True, exist_ok=True)
    target = EXTENSION.with_suffix(".tmp")
    lib = [f"-L{path}" for path in tools.lib]
    command = [str(tools.nvcc), "-shared", "-cudart", "static", *lib, *map(str, objects), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the extension does not link:\n{done.stdout}{done.stderr}")
    os.replace(target, EXTENSION)


def load_extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location("w4a4ops", EXTENSION)
    if spec is None or spec.loader is None:
        raise BuildError(f"{EXTENSION} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(archs: list[str], jobs: int) -> list[ptxas_report.Kernel]:
    """Compile, link, import; the report of every kernel and architecture. Raises BuildError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    tools = find_toolchain()
    headers = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(KERNELS.rglob("*"))
        if path.suffix in (".h", ".cuh") and path.is_file()
    )
    started = time.monotonic()
    todo = {**sources(archs), KERNELS / "bindings.cpp": archs}
    commands = {source: compile_command(tools, source, wanted) for source, wanted in todo.items()}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {source: pool.submit(compile_one, command, source, headers) for source, command in commands.items()}
        results = {source: future.result() for source, future in futures.items()}
    link(tools, [target for target, _ in results.values()])
    module = load_extension()
    launches = {ptxas_report.short_name(k["name"]): k for k in module.kernels()}
    kernels = [kernel for _, log in results.values() for kernel in ptxas_report.parse(log)]
    kernels = [ptxas_report.with_launch(kernel, launches.get(kernel.name)) for kernel in kernels]
    report = {"nvcc": tools.version, "archs": archs, "kernels": [kernel.to_dict() for kernel in kernels]}
    (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - started
    print(f"Wrote {EXTENSION.relative_to(ROOT)} · {len(kernels)} kernels for {' '.join(archs)} · {seconds:.1f} s")
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archs", default=os.environ.get("OMNIW4_CUDA_ARCHS") or DEFAULT_ARCHS, help="e.g. '80 90a'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--allow-spills", action="store_true", help="report spills instead of failing")
    parser.add_argument("--table", type=Path, help="write the table of registers and occupancy into this page")
    args = parser.parse_args()
    try:
        kernels = build(args.archs.replace(",", " ").split(), args.jobs)
        if args.table:
            ptxas_report.write_table(args.table, kernels)
    except (BuildError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    spilled = [k for k in kernels if k.spill_stores or k.spill_loads]
    for kernel in spilled:
        print(f"error: {kernel.name} for sm_{kernel.arch} spills {kernel.spill_stores} bytes", file=sys.stderr)
    return 1 if spilled and not args.allow_spills else 0


if __name__ == "__main__":
    sys.exit(main())
