"""How long `omniw4 calibrate` and `omniw4 quantize` take, phase by phase; needs no network.

    python scripts/time_quantize.py --shape smollm2 --device cuda             random weights of SmolLM2-135M's shape
    python scripts/time_quantize.py --shape qwen3 --device cuda               28 layers, hidden size 1024
    python scripts/time_quantize.py --model DIR --stats DIR --device cpu      a model and its statistics
    ... --trace                                                               launches, and the slowest kernels

In one process the linears are quantized three times: cold, with the clock stopped at every phase (which waits for the
GPU, and so takes longer), and as a user has it. Then the verb runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen3": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
PHASES = (  # module, function, what it is called here; a phase inside another is not counted in that one
    ("calibrate.stats.Stats", "linear", "statistics: read, hash, unpack"),
    ("quantize.pipeline", "_stats_of", "statistics: to the device"),
    ("quantize.pipeline", "_load", "weights: read, to the device"),
    ("quantize.layer", "_check", "checks"),
    ("quantize.layer", "input_spaces", "Hessians smoothed and rotated"),
    ("quantize.layer", "_factorise", "Cholesky factors"),
    ("quantize.layer", "gptq", "GPTQ, but for columns and scales"),
    ("quantize.layer", "coordinate_descent", "sweeps, but for columns"),
    ("quantize.gptq", "round_columns", "columns of GPTQ"),
    ("quantize.refine", "round_columns", "columns of sweeps"),
    ("quantize.scales", "_least_error", "search for scales"),
    ("quantize.alternate", "svd_lowrank", "low-rank branch"),
    ("quantize.alternate", "measure", "errors of rounds"),
    ("quantize.layer", "_data_free_errors", "the data-free recipe, but for branch, scales and errors"),
    ("quantize.layer", "_report", "report"),
    ("quantize.layer", "_assemble", "packing"),
    ("checkpoint.layers.LayerStore", "put", "layer files"),
)


class Clock:
    """Seconds by phase; what runs inside a phase that is named itself counts there."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._synchronize = synchronize
        self._stack: list[str] = ["the rest"]
        self._since = time.perf_counter()

    def _switch(self) -> None:
        self._synchronize()
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def wrap(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._switch()
            self._stack.append(label)
            self.calls[label] += 1
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._stack.pop()

        return timed

    def table(self) -> str:
        self._switch()
        return "\n".join(f"  {s:7.2f} s {self.calls[label]:6d}×  {label}" for label, s in self.seconds.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="make a random model of this shape")
    parser.add_argument("--model", type=Path, help="folder of a model, in place of a random one")
    parser.add_argument("--stats", type=Path, help="its statistics; made from random tokens where not given")
    parser.add_argument("--layers", type=int, help="blocks of the random model, in place of all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", default="default")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--trace", action="store_true", help="kernels and launches of one more run")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (chosen.shape is None) == (chosen.model is None):
        parser.error("give either --shape or --model")
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT / "src"))
    with tempfile.TemporaryDirectory(prefix="omniw4-time-") as name:
        found = measure(chosen, Path(name))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    import torch

    from omniw4.ops import extension

    found: dict[str, Any] = {"device": chosen.device, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if chosen.device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(chosen.device)
        found["without kernels"] = extension.why_not_on(torch.device(chosen.device))
    print(found, flush=True)
    model = chosen.model or random_model(SHAPES[chosen.shape], chosen.layers, work / "model")
    stats = chosen.stats
    if stats is None:
        stats = work / "stats"
        found["calibrate"] = timed("calibrate, random tokens", partial(calibrate, model, stats, chosen))
    runs = [("cold", False), ("phases", True), ("warm", False)]
    for label, with_phases in runs:
        found[label], phases = quantize_once(model, stats, work / "layers", chosen, with_phases)
        print(f"quantize, {label}: {found[label]:.2f} s", flush=True)
        if phases:
            found["by phase"] = dict(phases.seconds)
            print(phases.table(), flush=True)
    if chosen.trace:
        trace(partial(quantize_once, model, stats, work / "layers", chosen, False))
    command = [sys.executable, "-m", "omniw4", "quantize", model, "--stats", stats, "--out", work / "checkpoint"]
    command += ["--device", chosen.device, "--config", chosen.config, "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    found["verb"] = timed(
        "omniw4 quantize, the whole verb", lambda: subprocess.run(list(map(str, command)), check=True, env=environment)
    )
    return found


def timed(label: str, function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    seconds = time.perf_counter() - began
    print(f"{label}: {seconds:.2f} s", flush=True)
    return seconds


def random_model(shape: dict[str, Any], layers: int | None, folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    sizes["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    qwen3 = "head_dim" in shape
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if qwen3 else LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def calibrate(model: Path, stats: Path, chosen: argparse.Namespace) -> None:
    import torch

    from omniw4 import calibrate as steps
    from omniw4 import model as models

    g = torch.Generator().manual_seed(0)
    loaded = models.load(model, device=chosen.device)
    vocabulary = min(VOCABULARY, loaded.model.config.vocab_size)
    tokens = torch.randint(0, vocabulary, (chosen.samples, chosen.seq_len), generator=g)
    data = steps.TokenSet(tokens, torch.ones_like(tokens, dtype=torch.bool), {"dataset": "random tokens"})
    stats.mkdir()
    steps.calibrate(loaded, data, stats)


def quantize_once(
    model: Path, stats_folder: Path, layers: Path, chosen: argparse.Namespace, with_phases: bool
) -> tuple[float, Clock | None]:
    """Seconds from statistics on disk to layer files, model folder opened before."""
    import torch

    from omniw4 import config
    from omniw4 import model as models
    from omniw4.calibrate import Stats
    from omniw4.checkpoint import LayerStore
    from omniw4.quantize.pipeline import quantize_model
    from omniw4.quantize.plan import make_plan

    recipe = config.load(chosen.config).recipe
    skeleton = models.skeleton(model)
    plan = make_plan(models.shapes(skeleton), recipe, models.block_linears(skeleton))
    stats, streamed = Stats.open(stats_folder), models.stream(model)
    assert streamed is not None, "the model's files cannot be read tensor by tensor"
    weights = {entry.path: partial(streamed.linear, entry.path) for entry in plan.quantized}
    shutil.rmtree(layers, ignore_errors=True)
    store = LayerStore(layers)
    synchronize = torch.cuda.synchronize if chosen.device.startswith("cuda") else lambda: None
    clock = Clock(synchronize) if with_phases else None
    threads = torch.get_num_threads()
    restored = instrument(clock) if clock is not None else []
    began = time.perf_counter()
    try:
        if clock is not None:
            import omniw4.quantize.pipeline as pipeline

            restored.append((pipeline, "side_by_side", pipeline.side_by_side))
            setattr(pipeline, "side_by_side", lambda *_: 1)  # noqa: B010  (a clock for one thread)
        options: dict[str, Any] = {"group_of": stats.group_of, "device": chosen.device}
        quantize_model(weights, plan, recipe, stats.linear, store.put, **options)
        synchronize()
    finally:
        for owner, name, original in restored:
            setattr(owner, name, original)
        torch.set_num_threads(threads)
    return time.perf_counter() - began, clock


def instrument(clock: Clock) -> list[tuple[Any, str, Any]]:
    """Put the clock around every phase; what was there before, to be put back."""
    import importlib

    before = []
    for place, name, label in PHASES:
        module, _, attribute = place.rpartition(".") if place.rpartition(".")[2][0].isupper() else (place, "", "")
        owner = importlib.import_module(f"omniw4.{module}")
        owner = getattr(owner, attribute) if attribute else owner
        original = getattr(owner, name)
        before.append((owner, name, original))
        setattr(owner, name, clock.wrap(original, label))
    return before


def trace(run: Callable[[], object]) -> None:
    """Launches, and the kernels of the GPU that took longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        run()
    events = found.key_averages()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    waits = sum(event.count for event in events if event.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    print(f"{launches} launches, {waits} waits for the GPU")
    print(events.table(sort_by=order, row_limit=25, max_name_column_width=70), flush=True)


if __name__ == "__main__":
    sys.exit(main())
