"""What ``omniw4 quantize --dry-run`` prints: each linear, what will be done to it, and what all of it costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omniw4.cli.output import clock, size, table

if TYPE_CHECKING:
    from omniw4.config import Recipe
    from omniw4.quantize.plan import Plan, PlanEntry

_OVERHEAD = 4.0  # measured over the floating-point operations counted here, SmolLM2-135M on two cores
_WORKING_COPIES = 8  # FP32 copies of one group's stacked weight that are alive at a time, and of its Hessian


def stored_bytes(entry: PlanEntry) -> int:
    """Bytes of one linear in the checkpoint; its 16 bits a weight when it stays as it is."""
    n, k = entry.out_features, entry.in_features
    if entry.spec is None:
        return 2 * n * k
    return n * k // 2 + n * k // 32 + 2 * entry.spec.rank * (n + k) + (2 * k if entry.spec.smooth else 0)


def document(plan: Plan, recipe: Recipe, other_bytes: int) -> dict[str, Any]:
    """The plan as ``--json`` prints it.

    Args:
        other_bytes: of the tensors that are no linears, in 16 bits.
    """
    chosen = [e for e in plan.entries if e.spec is not None]
    before = sum(2 * e.out_features * e.in_features for e in plan.entries) + other_bytes
    after = sum(map(stored_bytes, plan.entries)) + other_bytes
    quantized = sum(map(stored_bytes, chosen))
    weights = sum(e.out_features * e.in_features for e in chosen)
    return {
        "linears": [
            {
                "path": e.path,
                "out_features": e.out_features,
                "in_features": e.in_features,
                "bias": e.bias,
                "spec": e.spec.to_dict() if e.spec is not None else None,
                "skip_reason": e.skip_reason,
                "bytes_before": 2 * e.out_features * e.in_features,
                "bytes_after": stored_bytes(e),
            }
            for e in plan.entries
        ],
        "quantized": len(chosen),
        "skipped": len(plan.entries) - len(chosen),
        "bytes_before": before,
        "bytes_after": after,
        "bits_per_weight": 8 * quantized / weights if weights else None,
        "peak_memory_bytes": before + _working_bytes(chosen),
        "disk_bytes": after + quantized,
        "estimated_seconds": _seconds(chosen, recipe),
        "recipe": recipe.model_dump(mode="json"),
    }


def text(plan: dict[str, Any]) -> str:
    """The document for a person."""
    rows = []
    for e in plan["linears"]:
        spec = e["spec"]
        done = f"w4a{spec['act_bits']} r{spec['rank']} {spec['rotation']}" if spec else f"as it is: {e['skip_reason']}"
        sizes = (size(e["bytes_before"]), size(e["bytes_after"]))
        rows.append((e["path"], f"{e['out_features']}×{e['in_features']}", done, *sizes))
    bits = f", {plan['bits_per_weight']:.2f} bits a quantized weight" if plan["bits_per_weight"] else ""
    facts = [
        ("linears", f"{plan['quantized']} quantized, {plan['skipped']} as they are"),
        ("size", f"{size(plan['bytes_before'])} in 16 bits, {size(plan['bytes_after'])} after{bits}"),
        ("peak memory", f"about {size(plan['peak_memory_bytes'])}: the model in 16 bits and one group's working set"),
        ("disk", f"{size(plan['disk_bytes'])} while it runs, {size(plan['bytes_after'])} when it is done"),
        ("time", f"about {clock(plan['estimated_seconds'])} on this machine's CPU"),
    ]
    head = table(("linear", "shape", "plan", "before", "after"), rows, left=3)
    return head + "\n\n" + "\n".join(f"{name:<12} {value}" for name, value in facts)


def _working_bytes(entries: list[PlanEntry]) -> int:
    """FP32 working set of the largest group, taken as three linears of the largest shape."""
    largest = max((3 * e.out_features * e.in_features + e.in_features**2 for e in entries), default=0)
    return 4 * _WORKING_COPIES * largest


def _seconds(entries: list[PlanEntry], recipe: Recipe) -> float:
    """Operations of GPTQ, of the low-rank rounds and of the factors, over this machine's measured rate."""
    rounds = recipe.lowrank.rounds if recipe.lowrank.rank else 1
    operations = 0.0
    for e in entries:
        n, k = e.out_features, e.in_features
        rank = e.spec.rank if e.spec is not None else 0
        operations += rounds * (2 * n * k * k * (1 if recipe.gptq.enabled else 0) + 40 * n * k * (rank + 8))
        operations += k**3 * (1 if recipe.gptq.enabled else 0)
    return _OVERHEAD * operations / _rate()


def _rate() -> float:
    """FP32 operations a second of this machine's matrix product."""
    import torch

    x = torch.ones(512, 512)
    x @ x
    begin = time.perf_counter()
    for _ in range(4):
        x @ x
    return 4 * 2 * 512**3 / max(time.perf_counter() - begin, 1e-9)
