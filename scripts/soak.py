"""The long versions of the reliability tests: kills and steps. Minutes to hours; a GPU is used where there is one.

    python scripts/soak.py kills --trials 200     kill -9 at random instants of the verbs that write
    python scripts/soak.py steps --steps 10000    quantized linears and the engine, random lengths: same bits, no growth

Prints one line a series, writes what it found as JSON with --json, and ends with 1 when a promise does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_GROWTH = 16 << 20  # bytes that allocators may come to keep; leaking one input a step would be far more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", choices=["kills", "steps"])
    parser.add_argument("--trials", type=int, default=200, help="kills of each verb (200)")
    parser.add_argument("--verb", default="", help="kills of verbs whose name begins so alone (all)")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of each linear and engine (10000)")
    parser.add_argument("--seed", type=int, default=None, help="of lengths and instants (another each time)")
    parser.add_argument("--json", type=Path, default=None, help="write what was found here")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before torch is imported: forked processes have no threads
    sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/reliability")]
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    print(f"seed {seed}", flush=True)
    found = kills(options.trials, seed, options.verb) if options.series == "kills" else steps(options.steps, seed)
    if options.json is not None:
        options.json.write_text(json.dumps({"series": options.series, "seed": seed, "found": found}, indent=2) + "\n")
    return 0 if all(series["held"] for series in found) else 1


def kills(trials: int, seed: int, wanted: str) -> list[dict[str, Any]]:
    import kills

    from tiny_checkpoint import make_model

    found = []
    with tempfile.TemporaryDirectory(prefix="omniw4-soak-") as name:
        folder = Path(name)
        model = make_model(folder / "model", "qwen3")
        rng = random.Random(0)
        text = folder / "words.txt"
        text.write_text(" ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(2000)))
        stats, checkpoint = folder / "stats", folder / "checkpoint"
        assert kills.run("calibrate", model, "--dataset", text, *kills.CALIBRATE, "--out", stats) == 0
        assert kills.run("quantize", model, "--stats", stats, *kills.QUANTIZE, "--out", checkpoint) == 0
        for number, verb in enumerate(kills.verbs(model, text, stats, checkpoint)):
            if not verb.name.startswith(wanted):
                continue
            began = time.monotonic()
            told: dict[str, Any] = {"verb": verb.name, "held": True}
            try:
                told |= asdict(kills.kill_often(verb, folder / f"series-{number}", trials, seed))
            except AssertionError as e:
                told |= {"held": False, "why": str(e)}
            told["seconds"] = round(time.monotonic() - began)
            print(json.dumps(told), flush=True)
            found.append(told)
    return found


def steps(count: int, seed: int) -> list[dict[str, Any]]:
    """Every kind of quantized linear, and the engine with every back end that runs here."""
    import steps
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = []

    def tell(name: str, began: float, soak: steps.Soak) -> None:
        told = {"steps of": f"{name} on {device}", "held": soak.differing == 0 and soak.left == 0, **asdict(soak)}
        told["held"] &= soak.growth < MAX_GROWTH
        told["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(told), flush=True)
        found.append(told)

    for act_bits, scale_type in itertools.product((4, 8), ("float16", "integer")):
        began = time.monotonic()
        linear = steps.linear(device, act_bits, scale_type=scale_type)
        calls = steps.linear_calls(device, seed=seed)
        tell(f"linear W4A{act_bits}, {scale_type} scales", began, steps.run(linear, calls, device, count, seed=seed))
    model = steps.model(device)
    for backend in ("w4a4", "fp16") if device.type == "cuda" else ("reference",):
        began = time.monotonic()
        engine = steps.engine(model, backend)
        calls = steps.engine_calls(engine, seed)
        tell(f"engine {backend}", began, steps.run(engine, calls, device, count, seed=seed))
        del engine, calls
    return found


if __name__ == "__main__":
    sys.exit(main())
