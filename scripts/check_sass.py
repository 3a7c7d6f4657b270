"""Check that the GEMM of family mma_s4 is native INT4 where the hardware has it, ``IMMA.16864.S4.S4`` in the cubins,
and that of family mma_s8 native INT8, ``IMMA.16832.S8.S8``.

Needs cuobjdump and nvdisasm, from the CUDA toolkit or from PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; no
GPU. On sm_90 the compiler emulates the first, so there is nothing to find there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_kernels import EXTENSION
from ptxas_report import demangle, short_name

NATIVE_ARCHS = ("80", "86", "89")
INSTRUCTIONS = {"gemm_lora_up<": "IMMA.16864.S4.S4", "gemm_lora_up_s8<": "IMMA.16832.S8.S8"}


def find_cuobjdump() -> Path | None:
    """On PATH, in /usr/local/cuda, or in the PyPI package."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    on_path = shutil.which("cuobjdump")
    candidates = [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/cuobjdump"), *sorted(site.glob("cu*/bin/cuobjdump"), reverse=True)]
    return next((path for path in candidates if path.is_file()), None)


def instructions(
    extension: Path, arch: str, cuobjdump: Path, pattern: str = r"\bIMMA\.[\w.]+"
) -> dict[str, Counter[str]]:
    """How often each instruction that matches ``pattern`` occurs, for every kernel of one architecture.

    Raises:
        RuntimeError: the disassembler failed, or found no kernel.
    """
    command = [str(cuobjdump), "--dump-sass", "--gpu-architecture", f"sm_{arch}", str(extension)]
    environment = {**os.environ, "PATH": f"{cuobjdump.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        if "Function : " in line:
            current = found.setdefault(short_name(demangle(line.split("Function : ", 1)[1].strip())), Counter())
        elif match := re.search(pattern, line):
            current[match[0]] += 1
    if done.returncode or not found:
        raise RuntimeError(f"{cuobjdump} found no kernel for sm_{arch} in {extension}: {done.stderr.strip()}")
    return found


def emulated(extension: Path, arch: str, cuobjdump: Path) -> list[str]:
    """GEMM kernels of one architecture without the native instruction; raises RuntimeError when there is no GEMM."""
    kernels = instructions(extension, arch, cuobjdump)
    found = []
    for start, wanted in INSTRUCTIONS.items():
        family = {name: count for name, count in kernels.items() if name.startswith(start)}
        if not family:
            raise RuntimeError(f"no {start[:-1]} compiled for sm_{arch} in {extension}")
        found += [name for name, count in family.items() if not any(wanted in instruction for instruction in count)]
    return found


def main() -> int:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None or not EXTENSION.is_file():
        missing = f"{EXTENSION} is not built" if cuobjdump else "no cuobjdump"
        print(f"error: {missing}\n\nhint: make kernels; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        return 2
    failed = False
    for arch in NATIVE_ARCHS:
        try:
            missing_in = emulated(EXTENSION, arch, cuobjdump)
        except RuntimeError as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
        failed |= bool(missing_in)
        print(f"sm_{arch}: {'no native product in ' + ', '.join(missing_in) if missing_in else 'native INT4 and INT8'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
