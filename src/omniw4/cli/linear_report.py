"""Tables of what ``bench --what linear`` finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omniw4.cli.output import figure, table

if TYPE_CHECKING:
    from omniw4.bench.linear_rows import Contest, QuantizerRow
    from omniw4.bench.result import BenchResult

COLUMNS = (
    "w4a4", "w4a8", "w4a4 fp16 scales", "w4a8 fp16 scales", "quantize", "w4a4 product", "fp16", "fp8", "fp8 quantized",
    "int8",
)  # fmt: skip


def linear_tables(result: BenchResult) -> list[str]:
    """Microseconds of every contestant, the ratios that matter, the quantizer beside a copy, and the figures."""
    header = ("linear", "M", "N", "K", *(f"µs {name}" for name in COLUMNS), "× fp16", "× fp8", "TOPS", "% of roofline")
    parts = [table(header, [_row(row) for row in result.linear])]
    if result.quantizer:
        header = ("quantize_lora_down", "M", "K", "µs", "µs with norm", "µs of a copy", "% of the copy")
        parts.append(table(header, [_quantizer(row) for row in result.quantizer]))
    figures = result.to_dict()["summary"]
    return [*parts, "\n".join(f"{name}: {value:.3f}" for name, value in figures.items()), *_notes(result.linear)]


def _row(row: Contest) -> tuple[str, ...]:
    return (
        *(row.name, str(row.m), str(row.n), str(row.k)),
        *(figure(row.us(name), ".1f") if row.checked else "WRONG" for name in COLUMNS),
        *(figure(row.ratio("w4a4", rival), ".2f") for rival in ("fp16", "fp8 quantized")),
        *(figure(row.tops("w4a4 product"), ".0f"), figure(row.roofline("w4a4 product"), ".0%")),
    )


def _quantizer(row: QuantizerRow) -> tuple[str, ...]:
    times = (row.quantize, row.with_norm, row.copy)
    return ("", str(row.m), str(row.k), *(f"{timing.median:.2f}" for timing in times), f"{row.share:.0%}")


def _notes(rows: Sequence[Contest]) -> list[str]:
    notes = dict.fromkeys(f"note: {row.name}, M {row.m}: {note}" for row in rows for note in row.notes)
    return ["\n".join(notes)] if notes else []
