"""The same model through other toolchains' GPTQ, timed side by side, judged by one evaluator.

    python scripts/peers.py MODEL --text calibration.txt --eval a.txt b.txt --out peers

Each peer is installed into a virtual environment of its own under ``--out`` and quantizes the model to 4 bits in groups
of 64 from the token sequences that ``omniw4 calibrate`` would draw. Its weights, dequantized, are written as a plain
model, and all models are then run over the same held-out windows by omniw4's evaluator. Peers quantize weights alone;
omniw4 is shown with 4-bit activations (its default) and without. They run one after the other; seconds are of the
clock and of the processors: peers from loaded model to quantized weights, omniw4 both verbs with all they load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GROUP, SAMPLES, SEQ_LEN = 64, 32, 1024
PEERS = {
    "llm-compressor": ["llmcompressor==0.14.0.1"],
    "GPTQModel": ["gptqmodel==7.7.0"],
}
RECIPES = {
    "omniw4 default (W4A4)": [],
    "omniw4 default, 16-bit activations": ["--set", "recipe.activations.bits=16"],
}


@dataclass
class Row:
    """``ratios``: perplexity over the original's, by text; ``note``: why there is nothing."""

    name: str
    version: str = ""
    seconds: float | None = None
    cpu_seconds: float | None = None
    ratios: dict[str, float] | None = None
    note: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an unquantized model")
    parser.add_argument("--text", required=True, help="calibration text")
    parser.add_argument("--eval", required=True, nargs="+", help="held-out texts")
    parser.add_argument("--out", type=Path, default=Path("peers"))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    chosen = parser.parse_args()
    names = chosen.peers.split(",") if chosen.peers else []
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    chosen.out, chosen.model = chosen.out.resolve(), str(Path(chosen.model).resolve())
    tokens = write_tokens(chosen)
    rows = []
    for name, flags in RECIPES.items():
        rows.append(run_ours(name, flags, chosen))
    for name in names:
        rows.append(run_peer(name, tokens, chosen))
    print(table(rows, [Path(text).stem for text in chosen.eval]))
    (chosen.out / "peers.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0


def write_tokens(chosen: argparse.Namespace) -> Path:
    """The calibration sequences, for peers to read."""
    from safetensors.torch import save_file

    from omniw4.calibrate.dataset import read_text, tokenize
    from omniw4.model import load

    loaded = load(chosen.model, dtype="float32")
    found = tokenize(read_text(chosen.text), loaded.tokenizer, chosen.samples, chosen.seq_len, name=chosen.text)
    target = chosen.out / "tokens.safetensors"
    save_file({"tokens": found.tokens.contiguous()}, target)
    return target


def run_ours(name: str, flags: list[str], chosen: argparse.Namespace) -> Row:
    """Both verbs as a user types them."""
    from omniw4 import __version__

    slug = name.replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")
    stats, target = chosen.out / f"stats-{slug}", chosen.out / slug
    verb = [sys.executable, "-m", "omniw4"]
    size = ["--samples", str(chosen.samples), "--seq-len", str(chosen.seq_len)]
    source = ["--dataset", chosen.text, "--out", str(stats), "--overwrite", "-q"]
    seconds, cpu = timed([*verb, "calibrate", chosen.model, *source, *size])
    paths = ["--stats", str(stats), "--out", str(target), "--overwrite", "-q"]
    more = timed([*verb, "quantize", chosen.model, *paths, *flags])
    row = Row(name, __version__, seconds + more[0], cpu + more[1], {})
    assert row.ratios is not None
    for text in chosen.eval:
        found = subprocess.run(
            [*verb, "verify", str(target), "--model", chosen.model, "--dataset", text, "--windows", str(chosen.windows),
             "--layer-tokens", "0", "--json"], stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        row.ratios[Path(text).stem] = json.loads(found.stdout)["perplexity"]["ratio"]
    return row


def run_peer(name: str, tokens: Path, chosen: argparse.Namespace) -> Row:
    slug = name.lower().replace("-", "_")
    folder, target = chosen.out / f"env-{slug}", chosen.out / f"{slug}-dequantized"
    python = folder / "bin" / "python"
    row = Row(name, PEERS[name][0].partition("==")[2])
    try:
        if not (folder / ".installed").is_file():
            install(name, folder, python)
        code = [str(python), str(ROOT / "scripts" / f"peer_{slug}.py"), chosen.model, str(tokens), str(target)]
        began = time.monotonic()
        # in its own folder: some write logs where they are started
        out = subprocess.run(code, stdout=subprocess.PIPE, check=True, env=quiet(), text=True, cwd=chosen.out).stdout
        measured = json.loads(out.strip().splitlines()[-1])
        print(f"{name}: {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    except subprocess.CalledProcessError as e:
        row.note = f"`{' '.join(map(str, e.cmd[:3]))} ...` ended with exit code {e.returncode}"
        return row
    row.seconds, row.cpu_seconds = measured["seconds"], measured["cpu_seconds"]
    row.ratios = ratios(chosen.model, str(target), chosen.eval, chosen.windows)
    return row


def install(name: str, folder: Path, python: Path) -> None:
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    import torch

    subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}", "setuptools", "wheel"], check=True)
    # no CUDA compiler is wanted for a run on a CPU
    environment = {**os.environ, "BUILD_CUDA_EXT": "0"}
    subprocess.run([*pip, "--no-build-isolation", *PEERS[name]], check=True, env=environment)
    (folder / ".installed").touch()


def ratios(original: str, other: str, texts: list[str], windows: int) -> dict[str, float]:
    """Perplexity of a plain model over the original's by text, on the windows that ``omniw4 verify`` takes."""
    from omniw4.calibrate.dataset import read_text, tokenize
    from omniw4.model import load
    from omniw4.verify.evaluate import Forward, compare, text_items
    from omniw4.verify.windows import make_windows

    first, second = (load(folder, dtype="float32") for folder in (original, other))
    found = {}
    for text in texts:
        documents = read_text(text)
        bos = tokenize(documents, first.tokenizer, 1, SEQ_LEN, name=text).fingerprint["bos"]["token"]
        items = text_items(make_windows(documents, first.tokenizer, windows, SEQ_LEN, bos).ids, labelled=True)
        ratio = compare(Forward(first.model), Forward(second.model), items).ratio
        assert ratio is not None
        found[Path(text).stem] = ratio
    return found


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of the clock and of processors that a command takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, env=quiet())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu


def quiet() -> dict[str, str]:
    # with one worker, its default on two cores, GPTQModel does not start
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GPTQMODEL_CPU_WORKERS": "2"}


def table(rows: list[Row], texts: list[str]) -> str:
    lines = [f"| | seconds | of processors | {' | '.join(texts)} |", "|---|---|---|" + "---|" * len(texts)]
    for row in rows:
        figures: list[Any] = ["–" if v is None else f"{v:.0f}" for v in (row.seconds, row.cpu_seconds)]
        found = row.ratios or {}
        figures += [f"{found[text]:.3f}" if text in found else row.note or "–" for text in texts]
        lines.append(f"| {row.name} {row.version} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
