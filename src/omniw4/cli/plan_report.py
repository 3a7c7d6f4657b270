"""What ``omniw4 quantize --dry-run`` prints: each linear, what will be done to it, and what all of it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omniw4.cli.output import clock, size, table

if TYPE_CHECKING:
    from omniw4.config import Recipe
    from omniw4.quantize.plan import Plan, PlanEntry
    from omniw4.tensors import LinearSpec

# Measured time over that of the operations counted here: SmolLM2-135M on two cores, blocks of a Qwen3 8B on an H200.
_OVERHEAD = {"cpu": 8.0, "cuda": 32.0}


def document(
    plan: Plan,
    recipe: Recipe,
    group_of: Callable[[str], str] | None,
    weights_total: int,
    resident: int,
    device: str,
) -> dict[str, Any]:
    """The plan as ``--json`` prints it.

    Args:
        group_of: name of the input a linear reads, when the statistics are known.
        weights_total: parameters of the whole model.
        resident: bytes of it that are in memory while it is quantized; 0 where its tensors are read when needed.
        device: what the maths will run on; the time is estimated by trying it.
    """
    from omniw4.quantize.pipeline import batch_limit, side_by_side

    model = weights_total * plan.source_bytes_per_weight
    finished = model - plan.bytes_before() + plan.bytes_after()
    working = side_by_side(plan, group_of, device) * plan.peak_bytes(group_of, batch_limit(device))
    on_gpu = device.startswith("cuda")
    return {
        **plan.to_dict(group_of),
        "quantized": len(plan.quantized),
        "skipped": len(plan.skipped),
        "model_bytes_before": model,
        "model_bytes_after": finished,
        "resident_bytes": resident,
        "peak_memory_bytes": resident + (plan.reading_bytes() if on_gpu else working),
        "gpu_memory_bytes": working if on_gpu else 0,
        "disk_bytes": finished + plan.bytes_after(),
        "estimated_seconds": round(_seconds(plan.input_groups(group_of), recipe, device)),
        "recipe": recipe.model_dump(mode="json"),
    }


def text(plan: Plan, told: dict[str, Any]) -> str:
    """The document for a person."""
    rows = []
    for e in plan.entries:
        s = e.spec
        done = _how(s) if s else f"as it is: {e.skip_reason}"
        source = e.weights * plan.source_bytes_per_weight
        stored = e.stored_bytes() if s else source
        rows.append((e.path, f"{e.out_features}×{e.in_features}", done, size(source), size(stored)))
    before, after = size(told["model_bytes_before"]), size(told["model_bytes_after"])
    whose = "the model and" if told["resident_bytes"] else "the model is read from disk tensor by tensor;"
    what = "one input's statistics" if told["gpu_memory_bytes"] else "one batch's working set"
    facts = [
        ("linears", f"{told['quantized']} quantized, {told['skipped']} as they are"),
        ("model", f"{before} before, {after} after, {told['effective_bits']:.2f} bits a quantized weight"),
        ("peak memory", f"about {size(told['peak_memory_bytes'])}: {whose} {what}, besides Python and torch"),
    ]
    if told["gpu_memory_bytes"]:
        facts.append(("GPU memory", f"about {size(told['gpu_memory_bytes'])}: one batch's working set"))
    facts += [
        ("disk", f"{size(told['disk_bytes'])} while it runs, {after} when it is done"),
        ("time", f"about {clock(told['estimated_seconds'])}"),
    ]
    head = table(("linear", "shape", "plan", "before", "after"), rows, left=3)
    return head + "\n\n" + "\n".join(f"{name:<12} {value}" for name, value in facts)


def _how(spec: LinearSpec) -> str:
    extras = " smooth" * spec.smooth + " integer" * (spec.scale_type == "integer")
    return f"w4a{spec.act_bits} r{spec.rank} {spec.rotation}{extras}"


def _seconds(groups: Sequence[Sequence[PlanEntry]], recipe: Recipe, device: str) -> float:
    """Operations of GPTQ, of the low-rank rounds and of the factors, over the measured rate of a matrix product."""
    from omniw4.quantize.smooth import STRENGTHS

    operations = 0.0
    for group in groups:
        k = group[0].in_features
        operations += 4 * k**3 if recipe.gptq.enabled else 0
        for e in group:
            rank = e.spec.rank if e.spec is not None else 0
            rounds = recipe.lowrank.rounds if rank else 1
            sweeps = recipe.gptq.sweeps + (recipe.gptq.sweeps > 0)  # one product more for the gradient
            gptq = 2 * e.weights * k if recipe.gptq.enabled else 0
            search = 64 * e.weights if recipe.weights.scale == "search" else 0
            operations += rounds * (gptq + search + 40 * e.weights * rank) + sweeps * gptq  # those for the best round
            if recipe.smooth.strength == "search":  # a branch, nearest codes and their error for each strength
                operations += len(STRENGTHS) * (4 * e.weights * k + search + 40 * e.weights * rank)
    return _OVERHEAD["cuda" if device.startswith("cuda") else "cpu"] * operations / _rate(device)


def _rate(device: str) -> float:
    """FP32 operations a second of a matrix product on the device, of one that keeps it busy."""
    import torch

    from omniw4.products import product

    size = 4096 if device.startswith("cuda") else 512
    x = torch.ones(size, size, device=device)
    product(x, x)[0, 0].item()
    begin = time.perf_counter()
    for _ in range(4):
        y = product(x, x)
    y[0, 0].item()
    return 4 * 2 * size**3 / max(time.perf_counter() - begin, 1e-9)
