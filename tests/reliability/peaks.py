"""Peak memory of quantizing one group of linears, as the plan states it and as it is measured."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from omniw4.calibrate.stats import Stats, StatsWriter
from omniw4.calibrate.walk import Group
from omniw4.config import Recipe
from omniw4.model import LinearShape
from omniw4.quantize import pipeline
from omniw4.quantize.pipeline import quantize_model
from omniw4.quantize.plan import Plan, make_plan
from omniw4.tensors import LinearStats

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
RUNS = 8
TOLERANCE = 0.15
NOISE = 4 << 20  # bytes: what a process of the same work takes more or less from one run to the next


def linears(outputs: Sequence[int], block: int = 0) -> list[str]:
    """Names of linears that read one input."""
    return [f"model.layers.{block}.linear.{i}" for i in range(len(outputs))]


def write_stats(folder: Path, k: int, inputs: Sequence[Sequence[str]]) -> Path:
    """Statistics of random inputs: for each the names of the linears that read it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, k, generator=g)
    hessian = (x.T @ x).div_(256)
    hessian.diagonal().add_(0.5)
    absmax, rms = x.abs().amax(0), x.square().mean(0).sqrt()
    folder.mkdir(parents=True)
    with StatsWriter(folder, {"model": {"hash": "0"}}, {}) as writer:
        groups = [Group(members[0], tuple(members), k) for members in inputs]
        writer.begin(groups)
        for group in groups:
            writer.put(group, LinearStats(hessian, hessian, absmax, rms, 4096))
    return folder


def plan_of(outputs: Sequence[int], k: int, recipe: Recipe, blocks: int = 1) -> Plan:
    paths = [linears(outputs, block) for block in range(blocks)]
    shapes = {path: LinearShape(n, k, False) for block in paths for path, n in zip(block, outputs, strict=True)}
    return make_plan(shapes, recipe, shapes)


def qwen3_shapes(blocks: int, hidden: int = 4096, mlp: int = 12288, kv: int = 1024) -> dict[str, LinearShape]:
    """The linears of a Qwen3 with 8 billion weights, or of one with other sizes."""
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return {
        f"model.layers.{i}.{name}": LinearShape(*size, False) for i in range(blocks) for name, size in sizes.items()
    }


def input_of(path: str) -> str:
    """Name of the input that one of these linears reads."""
    block, _, name = path.rpartition(".")
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    return f"{block}.{first.get(name, name)}"


def as_planned(planned: int, measured: int) -> bool:
    return abs(planned - measured) < TOLERANCE * measured + NOISE


def first_as_planned(peaks: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The first that is, or the smallest if none is; what comes after it is not measured."""
    seen = []
    for peak in peaks:
        if as_planned(*peak):
            return peak
        seen.append(peak)
    return min(seen)


def measure(
    outputs: Sequence[int], k: int, recipe: Recipe, stats_folder: Path, blocks: int = 1, at_once: int = 1
) -> tuple[int, int]:
    """Bytes (planned, measured) of quantizing linears ``[N, k]`` that read one input, in a process of their own.

    Measured is the rise of the resident memory, its peak over where it was before; a small group before it has made
    what the libraries keep.

    Args:
        blocks: how many such inputs there are.
        at_once: how many of them go through the quantizer as one batch, as on a GPU.
    """
    plan = plan_of(outputs, k, recipe, blocks)
    group_of = Stats.open(stats_folder).group_of
    limit = at_once * plan.peak_bytes(group_of) if at_once > 1 else 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, 64 << 10)  # freed tensors go back to the system, whatever their size
            stats = Stats.open(stats_folder)
            small = write_stats(stats_folder.with_name("small"), 128, [linears([128])])
            _quantize(plan_of([128], 128, recipe), recipe, Stats.open(small))
            library.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, code = _status("VmRSS"), _status("RssFile")
            pipeline.batch_limit = lambda device: limit
            _quantize(plan, recipe, stats)
            code = _status("RssFile") - code  # pages of the libraries that this run was the first to touch
            os.write(writer, json.dumps(_status("VmHWM") - before - code).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as result:
        told = result.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return plan.peak_bytes(group_of, limit), int(told)


def _quantize(plan: Plan, recipe: Recipe, stats: Stats) -> None:
    def load(n: int, k: int) -> tuple[torch.Tensor, None]:
        return torch.randn(n, k, generator=torch.Generator().manual_seed(1)).mul_(0.05), None

    weights = {e.path: (lambda e=e: load(e.out_features, e.in_features)) for e in plan.quantized}
    quantize_model(weights, plan, recipe, stats.linear, lambda *_: None, group_of=stats.group_of)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def main() -> None:
    """Measure the cases on stdin: a JSON list of ``[recipe, k, outputs, *others of measure]`` to one of ``[planned,
    measured]``.

    A recipe is a name, or what differs from the default.

    In a process that did nothing else before, since each case is a fork of it and begins with its memory. The smallest
    peak of up to eight runs counts, and the first that is what was planned ends them: on a busy machine the allocator
    gives a freed tensor's pages back late, now and then.
    """
    from omniw4 import config

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, k, outputs, *counts) in enumerate(json.load(sys.stdin)):
            changes = {"recipe": name} if isinstance(name, dict) else {}
            recipe = config.load(None if changes or name == "default" else name, changes).recipe
            members = [linears(outputs, block) for block in range(counts[0] if counts else 1)]
            runs = [Path(folder) / f"{i}-{run}" / "stats" for run in range(RUNS)]
            peaks = (measure(outputs, k, recipe, write_stats(stats, k, members), *counts) for stats in runs)
            found.append(first_as_planned(peaks))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
