"""What ``omniw4 quantize`` says about its layers: headline, table, warnings, closing line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omniw4 import __version__
from omniw4.cli.output import Output, clock, figure, size, table

if TYPE_CHECKING:
    from omniw4.checkpoint import Checkpoint
    from omniw4.config import Recipe
    from omniw4.quantize.plan import Plan
    from omniw4.tensors import LayerReport

LOW_SQNR_DB = 12.0  # a linear below it is worth a warning
_SHOWN = 3  # warnings of one kind that are spelled out


def headline(recipe: Recipe, plan: Plan, device: str) -> str:
    """``omniw4 0.1.0 · cpu · w4a4 g64 r16 hadamard64 · 196 linears``."""
    what = f"w4a{recipe.activations.bits} g{recipe.group_size} r{recipe.lowrank.rank}"
    rotation = f" {recipe.rotation}" if recipe.rotation != "none" else ""
    scales = " integer scales" if recipe.weights.scale_type == "integer" else ""
    return f"omniw4 {__version__} · {device} · {what}{rotation}{scales} · {len(plan.quantized)} linears"


def table_of(reports: list[LayerReport]) -> str:
    """A row for each linear; ``data-free`` is the error of the recipe ``rtn`` on the same linear, ``smoothing`` the
    strength that was chosen, where it was searched."""
    searched = any(r.smooth_strength is not None for r in reports)
    header = ["linear", "shape", "how", "rel. error", "data-free", "SQNR dB", "damp", "in rank", "round", "s"]
    header += ["smoothing"] * searched
    rows = [
        (
            *(r.path, f"{r.out_features}×{r.in_features}", r.method),
            *(
                f"{r.relative_error:.5f}",
                figure(_finite(r.rtn_error), ".5f"),
                f"{r.sqnr_db:.1f}",
                f"{r.damp:.3g}",
                f"{r.rank_energy:.0%}",
            ),
            *(f"{r.best_round + 1}/{len(r.rounds)}", f"{r.seconds:.2f}"),
            *([figure(r.smooth_strength, ".1f")] * searched),
        )
        for r in reports
    ]
    return table(header, rows, left=3)


def warn(reports: list[LayerReport], output: Output) -> None:
    """A warning for each noisy linear and each thing that went wrong; past a few the rest is counted."""
    low = sorted((r for r in reports if r.sqnr_db < LOW_SQNR_DB), key=lambda r: r.sqnr_db)
    for r in low[:_SHOWN]:
        output.warn(
            f"{r.path} has sqnr {r.sqnr_db:.1f} dB (below {LOW_SQNR_DB:.0f} dB)",
            f"give it a higher rank with `--override '{r.path}:rank=64'`, or leave it with `--skip '{r.path}'`",
        )
    if len(low) > _SHOWN:
        output.warn(f"{len(low) - _SHOWN} more linears are below {LOW_SQNR_DB:.0f} dB; the table above has them")
    from omniw4.checkpoint.inspect import same_warnings

    for text, paths in same_warnings(reports).items():
        where = paths[0] if len(paths) == 1 else f"{len(paths)} linears, such as {paths[0]}"
        output.warn(f"{where}: {text}")


def summary(
    checkpoint: Checkpoint, reports: list[LayerReport], plan: Plan, seconds: float
) -> tuple[dict[str, Any], str]:
    """The result as a document, and as ``Wrote OUT/ · 196 linears · 242 MiB (3.6x smaller, ...) · ...``."""
    total = sum(file.nbytes for file in checkpoint.files)
    before = total - plan.bytes_after() + plan.bytes_before()
    bits = checkpoint.effective_bits()
    worst = min(reports, key=lambda r: r.sqnr_db)
    document = {
        "hash": checkpoint.hash,
        "linears": len(reports),
        "skipped": {e.path: e.skip_reason for e in plan.skipped},
        "bytes": total,
        "effective_bits": bits,
        "seconds": round(seconds, 1),
        "layers": [{k: _finite(v) for k, v in r.to_dict().items()} for r in reports],
        "warnings": [f"{r.path}: {text}" for r in reports for text in r.warnings],
    }
    sizes = f"{size(total)} ({before / total:.1f}x smaller, {bits:.2f} bits a quantized weight)"
    text = f"Wrote OUT/ · {len(reports)} linears · {sizes} · worst {worst.sqnr_db:.1f} dB · {clock(seconds)}"
    return document, text


def _finite(value: Any) -> Any:
    """JSON has neither infinity, which the SQNR of an exact layer is, nor NaN: None in their place."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
