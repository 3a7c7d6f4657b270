"""Everything a report says, as one JSON-like document; the HTML and Markdown pages print it and know nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import omniw4
from omniw4.checkpoint import Checkpoint, Summary, summarize
from omniw4.checkpoint.inspect import same_warnings
from omniw4.errors import UsageError
from omniw4.report import tables
from omniw4.report.results import Result, beside, read_all
from omniw4.storage.files import without_nan

WORST = 10


def collect(folder: str | Path, results: Sequence[str] = ()) -> dict[str, Any]:
    """The document of one checkpoint.

    Args:
        results: files that verbs printed with ``--json``, read by :func:`omniw4.report.results.read`; those in the
            checkpoint's own folder are found without being named.

    Raises:
        CheckpointError: the folder breaks a rule of docs/checkpoint-format.md.
        UsageError: a file of results cannot be read, or is of another checkpoint or model.
    """
    summary = summarize(folder)
    checkpoint = Checkpoint.open(folder)
    found = read_all(beside(Path(folder)), results)
    for result in found:
        _check(result)
        _check_subject(result, summary)
    mine = {result.kind: result.document for result in found if not result.label}
    layers = _layers(summary, mine.get("verify"))
    document = {
        "omniw4": omniw4.__version__,
        "name": summary.name,
        "model": str((summary.provenance.get("source") or {}).get("name") or "") or None,
        "notes": _notes(found),
        "hash": summary.hash,
        "passed": mine["verify"]["passed"] if "verify" in mine else None,
        "gates": mine.get("verify", {}).get("gates", []),
        "sizes": _sizes(summary, checkpoint),
        "settings": _settings(summary),
        "quality": [_quality(result) for result in found if result.kind == "verify"],
        "layers": layers,
        "worst": sorted(layers, key=_error, reverse=True)[:WORST],
        "skipped": summary.skipped,
        "recipe": summary.recipe,
        "provenance": summary.provenance,
        "files": {file.path.name: file.nbytes for file in checkpoint.files},
        "warnings": _warnings(summary, mine.get("verify")),
        **{kind: mine.get(kind) for kind in ("bench", "profile", "roofline")},
    }
    plain: dict[str, Any] = without_nan(document)
    return plain


def _check(result: Result) -> None:
    """Refuse a document of another version, or one that was edited, before it breaks a page."""
    document = result.document
    try:
        if result.kind == "verify":
            tables.quality({"quality": [_quality(result)]})
            for row in document["layers"]:
                _ = row["path"], float(row["relative_error"] or 0), float(row["sqnr_db"] or 0)
            for gate in document["gates"]:
                _ = [gate[key] for key in ("name", "passed", "value", "relation", "limit", "detail")]
        else:
            {"bench": tables.bench, "profile": tables.profile, "roofline": tables.roofline}[result.kind](
                {result.kind: document}
            )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(
            f"the results of {result.kind}{f' for {result.label!r}' if result.label else ''} are not what this version "
            f"of it prints ({type(e).__name__}: {e})",
            hint=f"run `omniw4 {result.kind}` again with --json",
        ) from e


def _check_subject(result: Result, summary: Summary) -> None:
    """Refuse what another checkpoint gave, and another recipe's verdict on another model."""
    if not result.label and result.hash is not None and result.hash != summary.hash:
        again = f"run `omniw4 {result.kind}` on this checkpoint"
        raise UsageError(
            f"results {result.file!r} are of another checkpoint: content hash {result.hash[:16]}, that of "
            f"{summary.name!r} is {summary.hash[:16]}",
            hint=f"{again}, or show it as another recipe's: NAME={result.file}" if result.kind == "verify" else again,
        )
    judged, origin = result.document.get("model"), summary.provenance.get("source") or {}
    if result.label and isinstance(judged, dict) and judged and judged.get("hash") != origin.get("hash"):
        raise UsageError(
            f"results {result.file!r} for {result.label!r} are of another model: {judged.get('name')!r}, "
            f"{summary.name!r} was made from {origin.get('name')!r}",
            hint="recipes are compared on one model",
        )


def _notes(found: Sequence[Result]) -> list[str]:
    """What must be said of results that do not tell their checkpoint: an older version's, or none was given."""
    silent = [r for r in found if not r.label and r.hash is None and r.kind != "roofline"]
    return [f"{Path(r.file).name} ({r.kind}) does not say which checkpoint it is of" for r in silent]


def _sizes(summary: Summary, checkpoint: Checkpoint) -> dict[str, Any]:
    """Bytes of the quantized linears by what they are spent on, against 16 bits."""
    parts = {"codes": 0, "scales": 0, "low-rank branch": 0, "smoothing and biases": 0}
    names = {"qweight": "codes", "w_scales": "scales", "row_scales": "scales", "proj_down": "low-rank branch",
             "proj_up": "low-rank branch"}  # fmt: skip
    others = set(checkpoint.other_names)
    for row in summary.tensors:
        if row.name not in others:
            parts[names.get(row.name.rpartition(".")[2], "smoothing and biases")] += row.bytes
    return {
        "quantized_bytes": summary.quantized_bytes,
        "original_bytes": summary.original_bytes,
        "other_bytes": summary.other_bytes,
        "total_bytes": summary.total_bytes,
        "effective_bits": summary.effective_bits,
        "parts": parts,
    }


def _settings(summary: Summary) -> list[dict[str, Any]]:
    """The kinds of quantized linears there are, the commonest first."""
    scale_type = summary.quantization_config.get("scale_type", "float16")
    kinds: dict[tuple[Any, ...], int] = {}
    for row in summary.layers:
        key = (row.act_bits, row.rank, row.rotation)
        kinds[key] = kinds.get(key, 0) + 1
    return [
        {"act_bits": bits, "rank": rank, "rotation": rotation, "scale_type": scale_type, "linears": count}
        for (bits, rank, rotation), count in sorted(kinds.items(), key=lambda item: -item[1])
    ]


def _quality(result: Result) -> dict[str, Any]:
    verdict = result.document
    return {
        "recipe": result.label,  # empty: the checkpoint of this report
        "perplexity": verdict["perplexity"],
        "kl": verdict["kl"],
        "argmax_agreement": verdict["argmax_agreement"],
        "hidden_error": verdict.get("hidden_error"),
        "effective_bits": verdict.get("effective_bits"),
        "passed": verdict["passed"],
        "quality_gates": [gate["name"] for gate in verdict["gates"] if tables.judges_quality(gate)],
        "held_out": _held_out(verdict),
        "measured": _measured(verdict),
        "ran": f"{verdict.get('path', '-')} on {verdict.get('device', '-')}, {verdict.get('dtype') or '-'}",
    }


def _measured(verdict: dict[str, Any]) -> dict[str, Any]:
    """What the figures of a verdict are of; None for what an older one does not record."""
    windows, decoding = verdict.get("windows") or {}, verdict.get("decoding") or {}
    return {
        "model": (verdict.get("model") or {}).get("name"),
        "text": windows.get("dataset"),
        "windows": windows.get("count"),
        "seq_len": windows.get("seq_len"),
        "prompts": decoding.get("prompts"),
        "date": verdict.get("date"),
        # equal where two verdicts are of the same tokens
        "tokens": windows.get("ids_sha256") or [windows.get("source_sha256"), windows.get("samples")],
    }


def _held_out(verdict: dict[str, Any]) -> bool | None:
    """Whether the text is another than the checkpoint was made with, by its record; an older one only warned."""
    recorded = (verdict.get("windows") or {}).get("held_out")
    warned = any("are not held-out" in text for text in verdict.get("warnings", []))
    return False if warned else recorded


def _layers(summary: Summary, verdict: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row for each quantized linear; with a verdict also its error on held-out inputs, activations quantized."""
    held_out = {row["path"]: row for row in (verdict or {}).get("layers", [])}
    rows = []
    for row in summary.layers:
        judged = held_out.get(row.path, {})
        rows.append(
            {
                "path": row.path, "out_features": row.out_features, "in_features": row.in_features,
                "method": row.method, "act_bits": row.act_bits, "rank": row.rank, "bits": row.bits,
                "relative_error": row.relative_error, "data_free_error": row.rtn_error, "sqnr_db": row.sqnr_db,
                "rank_energy": row.rank_energy, "rank_95": judged.get("rank_95"),
                "smooth_strength": row.smooth_strength,
                "held_out_error": judged.get("relative_error"), "held_out_sqnr_db": judged.get("sqnr_db"),
                "warnings": row.warnings,
            }
        )  # fmt: skip
    return rows


def _error(row: dict[str, Any]) -> float:
    """What the worst linears are chosen by: the error on held-out inputs, or else on the calibration's."""
    for key in ("held_out_error", "relative_error"):
        if row[key] is not None and row[key] == row[key]:
            return float(row[key])
    return float("inf")


def _warnings(summary: Summary, verdict: dict[str, Any] | None) -> list[str]:
    of_layers = []
    for text, paths in same_warnings(summary.layers).items():
        where = paths[0] if len(paths) == 1 else f"{len(paths)} linears, such as {paths[0]}"
        of_layers.append(f"{where}: {text}")
    return [*of_layers, *(verdict or {}).get("warnings", [])]
