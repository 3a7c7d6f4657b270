"""What is installed, checked: versions against the lock, files against their hashes, advisories where there are any.

    python scripts/audit.py                 exit code 1 when something is not as it should be
    python scripts/audit.py --sbom FILE     write a CycloneDX 1.5 bill of materials, too

1. Every package of requirements-ci.txt is installed in its version (torch: that of constraints.txt).
2. Every file that a package's RECORD lists with a hash has that hash: nothing was changed after installation.
3. No package is there that neither the lock nor torch brings (reported, not refused).
4. Known vulnerabilities, by pip-audit where it is installed; it needs the network and is told apart from the rest.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MADE_HERE = {"pip", "omniw4", "torch"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbom", type=Path, default=None, help="write a CycloneDX bill of materials here")
    options = parser.parse_args()
    installed = {canonical(d.metadata["Name"]): d for d in distributions()}
    wanted = pinned((ROOT / "requirements-ci.txt").read_text(encoding="utf-8"))
    torch = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8")).get("torch", "")
    problems = [*wrong_versions(installed, {**wanted, "torch": torch}), *changed_files(installed)]
    brought = {canonical(name) for d in installed.values() for name in requirements(d)}
    extra = sorted(set(installed) - set(wanted) - MADE_HERE - brought)
    if options.sbom is not None:
        options.sbom.write_text(json.dumps(bill(installed), indent=2) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"error: {problem}")
    if extra:
        print(f"note: not in the lock: {', '.join(extra)}")
    print(f"{len(installed)} packages: {len(problems)} problems")
    return max(int(bool(problems)), advisories())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Name -> version of every line ``name==version``."""
    found = (re.match(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in text.splitlines())
    return {canonical(match[1]): match[2] for match in found if match}


def wrong_versions(installed: dict[str, Distribution], wanted: dict[str, str]) -> Iterator[str]:
    for name, version in wanted.items():
        if name not in installed:
            yield f"{name} {version} is not installed"
        elif installed[name].version.partition("+")[0] != version:
            yield f"{name} is {installed[name].version}, the lock has {version}"


def changed_files(installed: dict[str, Distribution]) -> Iterator[str]:
    """Files that are gone, or whose bytes are not those that were installed."""
    for name, distribution in installed.items():
        for file in distribution.files or ():
            if file.hash is None or file.hash.mode != "sha256":
                continue
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                yield f"{name}: {file} is gone"
                continue
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                yield f"{name}: {file} was changed after it was installed"


def requirements(distribution: Distribution) -> Iterator[str]:
    for requirement in distribution.requires or ():
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        if match:
            yield match[0]


def bill(installed: dict[str, Distribution]) -> dict[str, Any]:
    """CycloneDX 1.5, with what the packages say about themselves."""
    components = []
    for name in sorted(installed):
        metadata = installed[name].metadata
        version = installed[name].version
        component: dict[str, Any] = {
            "type": "library",
            "name": metadata["Name"],
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
        }
        if licence := metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]
        components.append(component)
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}


def advisories() -> int:
    tool = shutil.which("pip-audit") or shutil.which("pip-audit", path=str(Path(sys.executable).parent))
    if tool is None:
        print("note: pip-audit is not installed, so no advisories were looked up (pip install pip-audit)")
        return 0
    command = [tool, "--require-hashes", "--disable-pip", "-r", str(ROOT / "requirements-ci.txt")]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
