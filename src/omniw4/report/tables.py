"""The tables of a report as headers and rows of text, for both pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OPS = "Ops"
NONE = "–"  # where there is no number
_HELD_OUT = {
    True: "on another text than the checkpoint was made with",
    False: "on the text the checkpoint was made with, so not held-out",
    None: "on a text of which is not recorded whether the checkpoint was made with it",
}
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Table:
    """``mine``: index of the row that is about the checkpoint of the report, if one is."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    mine: int | None = None


def number(value: Any, form: str, otherwise: str = NONE) -> str:
    """A finite number in a format; something else where there is none."""
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else otherwise


def size(count: float) -> str:
    if count >= _GIB:
        return f"{count / _GIB:.2f} GiB"
    return f"{count / _MIB:.1f} MiB" if count >= _MIB / 10 else f"{count / 1024:.1f} KiB"


def count(number: int, noun: str = "linear") -> str:
    """``1 linear``, ``2 linears``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures a reader looks for first: (value, what it is)."""
    sizes = document["sizes"]
    before, after = sizes["original_bytes"], sizes["quantized_bytes"]
    found = [
        (
            number(before / after if after else None, ".1f") + "×",
            f"smaller: {size(before)} of linears to {size(after)}",
        ),
        (number(sizes["effective_bits"], ".2f"), "bits a weight, scales and low-rank branch included"),
    ]
    mine = next((row for row in document["quality"] if not row["recipe"]), None)
    if mine is not None:
        p = mine["perplexity"]
        if p["ratio"] is not None:
            found.append((f"×{p['ratio']:.3f}", f"perplexity: {p['reference']:.2f} to {p['quantized']:.2f}"))
        found.append((number(mine["kl"], ".3f"), "KL divergence from the original, nats a token"))
        found.append((number(mine["argmax_agreement"], ".1%"), "equal first choices"))
    return found


def quality(document: dict[str, Any]) -> Table | None:
    rows = document["quality"]
    if not rows:
        return None
    header = ("recipe", "reference", "quantized", "ratio", "KL", "equal first choices", "bits a weight", "gates")
    body = [
        (
            row["recipe"] or "this checkpoint", number(row["perplexity"]["reference"], ".2f"),
            number(row["perplexity"]["quantized"], ".2f"), number(row["perplexity"]["ratio"], ".3f"),
            number(row["kl"], ".3f"), number(row["argmax_agreement"], ".1%"), number(row["effective_bits"], ".2f"),
            ("passed" if row["quality_gates"] else "passed, no quality gate") if row["passed"] else "failed",
        )
        for row in rows
    ]  # fmt: skip
    mine = next((i for i, row in enumerate(rows) if not row["recipe"]), None)
    shown = rows[mine or 0]
    told = [] if mine is not None else [f"Measured: {measured(shown)}."]  # the head of the page tells of mine
    told.append(f"Perplexity {_HELD_OUT[shown['held_out']]}; ran: {shown['ran']}.")
    others = [row for row in rows if row["measured"]["tokens"] != shown["measured"]["tokens"]]
    told += [f"Not comparable, on other tokens: {row['recipe']} ({measured(row)})." for row in others]
    return Table(header, body, " ".join(told), mine)


def judges_quality(gate: dict[str, Any]) -> bool:
    """Whether a gate limits a figure that the user chose; the others are facts that always must hold."""
    return not isinstance(gate["limit"], bool)


def verdict(document: dict[str, Any]) -> tuple[str, str] | None:
    """Colour and words of the verification; None without one. Green only where something limited the quality."""
    if document["passed"] is None:
        return None
    if not document["passed"]:
        return "bad", "failed"
    if not any(judges_quality(gate) for gate in document["gates"]):
        return "warn", "passed (no quality gate was set)"
    return "good", "passed"


def gates(document: dict[str, Any]) -> Table | None:
    """The gates with their limits; facts that hold are named below, those that do not have a row."""
    held = [gate["name"] for gate in document["gates"] if gate["passed"] and not judges_quality(gate)]
    rows = []
    for gate in document["gates"]:
        if gate["name"] in held:
            continue
        told = (number(gate["value"], ".5g"), f"{gate['relation']} {number(gate['limit'], '.5g')}")
        told = told if judges_quality(gate) else (NONE, "holds")
        rows.append((str(gate["name"]), *told, "passed" if gate["passed"] else "failed", str(gate["detail"])))
    note = f"Also checked, and true: {', '.join(held)}." if held else ""
    if not rows and not held:
        return None
    header = ("gate", "measured", "wanted", "result", "")
    return Table(header, rows or [("of the quality", NONE, "none was set", NONE, "")], note)


def measured(row: dict[str, Any]) -> str:
    """What a verdict's figures are of: model, text, windows and tokens, date."""
    found = row["measured"]
    parts = [
        f"{found['model'] or 'model not recorded'} on {found['text'] or 'a text not recorded'}",
        f"{count(found['windows'], 'window')} × {count(found['seq_len'], 'token')}" if found["windows"] else "",
        f"{count(found['prompts'], 'prompt')} decoded" if found["prompts"] else "",
        str(found["date"])[:10] if found["date"] else "date not recorded",
    ]
    return ", ".join(filter(None, parts))


def title(document: dict[str, Any]) -> str:
    """Checkpoint and model."""
    return f"{document['name']} · {document['model'] or 'a model without a name'}"


def lead(document: dict[str, Any]) -> str:
    """What the quality of this checkpoint was measured on; empty without a verdict."""
    mine = next((row for row in document["quality"] if not row["recipe"]), None)
    return "" if mine is None else f"Quality measured: {measured(mine)}"


def linears(rows: Sequence[dict[str, Any]]) -> Table:
    header = ["linear", "shape", "how", "act", "rank", "bits", "error", "data-free", "SQNR dB", "held-out error"]
    header += ["in rank", "rank for 95 %", "smoothing"]
    body = [
        [
            *(row["path"], f"{row['out_features']}×{row['in_features']}", row["method"], str(row["act_bits"])),
            *(str(row["rank"]), f"{row['bits']:.2f}", number(row["relative_error"], ".5f")),
            *(
                number(row["data_free_error"], ".5f"),
                number(row["sqnr_db"], ".1f"),
                number(row["held_out_error"], ".5f"),
            ),
            *(number(row["rank_energy"], ".0%"), number(row.get("rank_95"), "d")),
            number(row.get("smooth_strength"), ".1f"),
        ]
        for row in rows
    ]
    shown = [i for i in range(len(header)) if i < 7 or any(row[i] != NONE for row in body)]
    return Table([header[i] for i in shown], [[row[i] for i in shown] for row in body])


def bench(document: dict[str, Any]) -> list[tuple[str, Table]]:
    """Tables of a benchmark: ops, whole models, engines of the backbone."""
    result = document["bench"]
    found = []
    if result.get("ops"):
        header = ("op", "M", "N", "K", "µs", "TOPS", "GB/s", "of the roofline", "vs 16 bits")
        ops = [
            (
                *(row["op"], str(row["m"]), str(row["n"]), str(row["k"]), _us(row["timing"])),
                *(number(row["tops"], ".3f"), number(row["gbs"], ".2f"), number(row["roofline"], ".0%")),
                _times(row["vs_fp16"]),
            )
            for row in result["ops"]
        ]
        found.append((OPS, Table(header, ops)))
    if result.get("model"):
        columns = ("forward", "mode", "ms quantized", "ms original", "vs original")
        models = [
            (
                *(f"{row['batch']}×{row['seq_len']}", row["mode"], _ms(row["quantized"]), _ms(row["original"])),
                _times(row["vs_original"]),
            )
            for row in result["model"]
        ]
        found.append(("Whole forwards", Table(columns, models)))
    if result.get("backbone"):
        titles = ("engine", "tokens", "ms a step", "± ms", "vs transformers", "weights", "attention")
        steps = [
            (
                *(row["engine"], str(row["tokens"]), _ms(row["timing"]), _spread_ms(row["timing"])),
                *(_times(row["speedups"].get("hf-eager")), size(row["weight_bytes"]) if row["weight_bytes"] else NONE),
                row["attention"] or NONE,
            )
            for row in result["backbone"]
        ]
        found.append(("Steps of the backbone", Table(titles, steps)))
    if result.get("omnivoice"):
        names = ("engine", "batch", "real-time factor", "vs package", "memory")
        requests = [
            (
                *(row["engine"], str(row["batch"]), number(row["mean_rtf"], ".4f"), _times(row["speedup"])),
                size(row["memory_bytes"]) if row["memory_bytes"] else NONE,
            )
            for row in result["omnivoice"]
        ]
        found.append(("Requests of OmniVoice", Table(names, requests)))
    return found


def profile(document: dict[str, Any]) -> Table:
    """Kinds of kernels down, engines across."""
    engines = document["profile"]["engines"]
    kinds = list(dict.fromkeys(row["kind"] for engine in engines for row in engine["breakdown"]))
    header = ("kind", *(f"{e['name']}: {what}" for e in engines for what in ("ms", "share", "calls")))
    rows = []
    for kind in kinds:
        cells: list[str] = []
        for engine in engines:
            row: dict[str, Any] = next((r for r in engine["breakdown"] if r["kind"] == kind), {})
            cells += [number(row.get("ms"), ".3f"), number(row.get("share"), ".1%"), number(row.get("count"), ".0f")]
        rows.append((kind, *cells))
    total: list[str] = []
    for engine in engines:
        idle = f"idle {number(engine['idle_share'], '.1%')}"
        total += [number(engine["step_ms"], ".3f"), idle, f"{engine['kernels']:.0f} kernels"]
    return Table(header, [*rows, ("a step", *total)])


def roofline(document: dict[str, Any]) -> Table:
    result = document["roofline"]
    widths = ("fp16", "fp8", "w4a8", "w4a4")
    header = ("op", "×", "shape", "GFLOP", "FLOP/byte", "bound", *(f"{w.upper()} µs" for w in widths))
    rows = [
        (
            *(row["op"], str(row["count"]), row["shape"], f"{row['ops'] * 1e-9:.2f}", f"{row['intensity']:.0f}"),
            *(row["bound"], *(number((row["times"][w] or {}).get("predicted_us"), ".1f") for w in widths)),
        )
        for row in result["rows"]
    ]
    totals = (number((result["total"][w]["predicted_us"] or math.nan) / 1000, ".3f") for w in widths)
    rows.append(("forward, ms", "", "", "", "", "", *totals))
    return Table(header, rows, f"{result['tokens']} tokens on {result['gpu']['name']}, predicted.")


def provenance(document: dict[str, Any]) -> list[tuple[str, str]]:
    origin = document["provenance"]
    source, calibration = origin.get("source") or {}, origin.get("calibration")
    found = [
        ("made from", f"{source.get('name') or NONE} · hash {str(source.get('hash') or NONE)[:16]}"),
        ("made by", f"omniw4 {origin.get('omniw4_version', NONE)}, format {origin.get('format_version', NONE)}"),
        ("content hash", document["hash"]),
        ("files", ", ".join(f"{name} ({size(count)})" for name, count in document["files"].items())),
    ]
    if calibration:
        data = calibration.get("data") or {}
        told = (
            f"{data.get('dataset') or NONE} · {data.get('samples')}×{data.get('seq_len')} · {data.get('tokens')} tokens"
        )
        if through := calibration.get("through"):
            told += f" · through checkpoint {str(through.get('checkpoint') or NONE)[:16]}"
        found.insert(1, ("calibrated on", told))
    else:
        found.insert(1, ("calibrated on", "nothing (data-free)"))
    if distilled := origin.get("distillation"):
        data, outcome = distilled.get("data") or {}, distilled.get("report") or {}
        losses = f"{number(outcome.get('held_out_before'), '.4f')} to {number(outcome.get('held_out_best'), '.4f')}"
        steps = f"{outcome.get('best_step')} of {outcome.get('steps')} steps on {data.get('dataset') or NONE}"
        found.insert(2, ("distilled", f"{steps}; held-out loss {losses}"))
    for kind in document["settings"]:
        scales = "" if kind["scale_type"] == "float16" else f", {kind['scale_type']} scales"
        told = f"W4A{kind['act_bits']} in groups of 64, rank {kind['rank']}, rotation {kind['rotation']}{scales}"
        found.append((count(kind["linears"]), told))
    if document["skipped"]:
        found.append(("as they were", count(len(document["skipped"]))))
    return found


def _us(timing: dict[str, Any] | None) -> str:
    return number(timing["median_us"], ".1f") if timing else NONE


def _times(speedup: float | None) -> str:
    return NONE if speedup is None else f"{speedup:.2f}×"


def _spread_ms(timing: dict[str, Any] | None) -> str:
    return number(timing["std_us"] / 1000, ".2f") if timing else NONE


def _ms(timing: dict[str, Any] | None) -> str:
    return number(timing["median_us"] / 1000, ".2f") if timing else NONE
