"""Tables of what ``bench`` finds about OmniVoice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omniw4.cli.output import figure, size, table

if TYPE_CHECKING:
    from omniw4.bench.omnivoice_rows import OmniVoiceRow


def omnivoice_tables(rows: Sequence[OmniVoiceRow]) -> list[str]:
    """Means of every engine, what must be said about them, and each request of those that ran one at a time."""
    header = (
        "omnivoice",
        "batch",
        "mean RTF",
        "× package",
        "ms a step",
        "s decoding",
        "s rest",
        "memory",
        "weights",
        "start-up",
    )
    notes = [f"note: {row.engine}, batch {row.batch}: {row.note}" for row in rows if row.note]
    single = [row for row in rows if row.batch == 1 and row.samples]
    requests = [(s.name, f"{s.audio_seconds:g} s") for s in single[0].samples] if single else []
    samples = [(*request, *(f"{row.samples[i].rtf:.4f}" for row in single)) for i, request in enumerate(requests)]
    each = [table(("RTF of", "audio", *(row.engine for row in single)), samples)] if samples else []
    return [table(header, [_mean(row) for row in rows]), *(["\n".join(notes)] if notes else []), *each]


def _mean(row: OmniVoiceRow) -> tuple[str, ...]:
    decoding = sum(sample.decoding_median for sample in row.samples)
    rest = sum(sample.median for sample in row.samples) - decoding
    weights, seconds = row.start_up.get("memory", {}).get("weights"), row.start_up.get("start_up", {}).get("seconds")
    return (
        *(row.engine, str(row.batch), figure(row.mean_rtf, ".4f") if row.checked else "WRONG"),
        *(figure(row.speedup, ".2f"), figure(row.step_ms, ".2f"), f"{decoding:.3f}", f"{rest:.3f}"),
        *(size(n) if n else "-" for n in (row.memory_bytes, weights)),
        f"{seconds:.1f} s" if seconds else "-",
    )
