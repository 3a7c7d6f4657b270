"""Write requirements-ci.txt: every package of the pinned environment with the SHA-256 of its file.

pip resolves `.[dev]` under constraints.txt for the interpreter and platform this runs on (CI's are in the file's first
line) and reports which file it would take; nothing is installed. torch is left out: each index has builds of its own
(CPU, one CUDA or another) under one version, so its hash says which build it is, not whether it is sound. Its version
is pinned in constraints.txt, and scripts/audit.py checks what is installed file by file.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-ci.txt"
LEFT_OUT = ("torch", "omniw4")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[dev]"]
        subprocess.run(command, check=True)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    python = ".".join(platform.python_version_tuple()[:2])
    lines = [
        f"# Python {python}, {platform.system()} {platform.machine()}; made by scripts/lock.py from constraints.txt.",
        "# torch comes from the index's own builds and is not here.",
    ]
    for item in sorted(chosen, key=lambda item: item["metadata"]["name"].lower()):
        package, version = item["metadata"]["name"], item["metadata"]["version"]
        if package.lower() in LEFT_OUT:
            continue
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{package}=={version.partition('+')[0]} --hash=sha256:{digest}")
    LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(lines) - 2} packages", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
