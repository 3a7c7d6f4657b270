"""``omniw4 inspect DIR|FILE``: what a checkpoint or a safetensors file holds, from headers alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4.cli import options
from omniw4.cli.output import figure, size, table
from omniw4.errors import UsageError

if TYPE_CHECKING:
    from omniw4.checkpoint import Summary


def command(
    path: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="Checkpoint folder, or a .safetensors file.")],
    layers: Annotated[bool, typer.Option("--layers", help="A row for every quantized linear.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="A row for every tensor.")] = False,
    recipe: Annotated[bool, typer.Option("--recipe", help="The recipe, as a config that --config takes.")] = False,
    hashes: Annotated[bool, typer.Option("--hashes", help="Read the files and compare their recorded hashes.")] = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show recipe, provenance, sizes and errors of a checkpoint; its structure is checked on the way."""
    if path.is_file() and path.suffix != ".safetensors":
        raise UsageError(
            f"{str(path)!r} is no .safetensors file", hint="name a checkpoint folder, or one of its .safetensors files"
        )
    of_checkpoints = {"--layers": layers, "--recipe": recipe, "--hashes": hashes}
    if path.is_file() and (given := [flag for flag, on in of_checkpoints.items() if on]):
        raise UsageError(
            f"{given[0]} is about a checkpoint, and {str(path)!r} is a single file",
            hint=f"name the checkpoint's folder, or leave out {given[0]}",
        )
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4.checkpoint import Checkpoint, summarize

    summary = summarize(path)
    if hashes:
        Checkpoint.open(path).check_hashes()
        output.note("hashes are those recorded")
    parts = [_head(summary)] if summary.kind == "checkpoint" else [_file_head(summary)]
    if recipe:
        import yaml

        told = yaml.safe_dump({"recipe": summary.recipe}, sort_keys=False, default_flow_style=None, width=100)
        parts = [told.rstrip()]  # alone, so that it can be saved as it is
    if layers:
        parts.append(_layer_table(summary))
    if tensors or summary.kind == "file":
        rows = [(t.name, f"{t.dtype}{t.shape}", size(t.bytes), t.file) for t in summary.tensors]
        parts.append(table(("tensor", "type", "size", "file"), rows, left=2))
    output.result("\n\n".join(parts), summary.to_dict())


def _head(summary: Summary) -> str:
    common = summary.quantization_config
    ratio = summary.original_bytes / summary.quantized_bytes if summary.quantized_bytes else 0
    kinds = Counter((r.act_bits, r.rank, r.rotation, r.scale_type) for r in summary.layers)
    errors = [r for r in summary.layers if r.sqnr_db is not None]
    worst = min(errors, key=lambda r: r.sqnr_db, default=None)
    warned = sum(bool(r.warnings) for r in summary.layers)
    facts = [
        ("checkpoint", f"{summary.name} · format {common.get('format_version')} · hash {summary.hash[:16]}"),
        ("made from", _source(summary.provenance)),
        ("calibrated on", _calibration(summary.provenance.get("calibration"))),
        ("made by", f"omniw4 {summary.provenance.get('omniw4_version', '-')}"),
        *(
            ("linears", f"{count} · w4a{bits} g{common.get('group_size')} r{rank} {rotation} · {scales} scales")
            for (bits, rank, rotation, scales), count in kinds.most_common()
        ),
        ("as they were", _count(len(summary.skipped))),
        ("size", f"{size(summary.total_bytes)} in {len(summary.files)} file{'s' * (len(summary.files) > 1)}"),
        ("quantized part", f"{size(summary.quantized_bytes)}, {ratio:.1f}x smaller than in 16 bits"),
        ("bits a weight", f"{summary.effective_bits:.2f}, low-rank branch included"),
    ]
    if worst is not None:
        facts.append(("worst linear", f"{worst.path} · sqnr {worst.sqnr_db:.1f} dB"))
    if warned:
        facts.append(("warnings", f"{warned} linears; --layers shows them"))
    return _lines(facts)


def _file_head(summary: Summary) -> str:
    kinds: Counter[str] = Counter()
    for row in summary.tensors:
        kinds[row.dtype] += row.bytes
    facts = [
        ("file", f"{summary.name} · {size(summary.total_bytes)} · {len(summary.tensors)} tensors"),
        *((f"  {dtype}", size(total)) for dtype, total in kinds.most_common()),
    ]
    return _lines(facts + [(f"  {key}", value[:200]) for key, value in summary.metadata.items()])


def _source(provenance: dict[str, Any]) -> str:
    source = provenance.get("source") or {}
    return f"{source.get('name') or '-'} · hash {str(source.get('hash') or '-')[:16]}"


def _calibration(fingerprint: dict[str, Any] | None) -> str:
    if not fingerprint:
        return "nothing (data-free)"
    data, through = fingerprint.get("data") or {}, fingerprint.get("through")
    passed = f" · through checkpoint {str(through.get('checkpoint'))[:16]}" if through else ""
    counts = f"{data.get('samples')}×{data.get('seq_len')} · {data.get('tokens')} tokens"
    return f"{data.get('dataset')} · {counts}{passed}"


def _layer_table(summary: Summary) -> str:
    searched = any(r.smooth_strength is not None for r in summary.layers)
    header = ["linear", "shape", "how", "act", "rank", "bits", "rel. error", "SQNR dB", "in rank", "damp"]
    header += ["smoothing"] * searched
    rows = [
        (
            *(r.path, f"{r.out_features}×{r.in_features}", r.method, str(r.act_bits), str(r.rank), f"{r.bits:.2f}"),
            *(figure(r.relative_error, ".5f"), figure(r.sqnr_db, ".1f"), figure(r.rank_energy, ".0%")),
            figure(r.damp, ".3g"),
            *([figure(r.smooth_strength, ".1f")] * searched),
        )
        for r in summary.layers
    ]
    warnings = [f"warning: {r.path}: {warning}" for r in summary.layers for warning in r.warnings]
    skipped = [f"as it was: {path} ({reason})" for path, reason in summary.skipped.items()]
    return "\n".join([table(header, rows, left=3), *warnings, *skipped])


def _count(linears: int) -> str:
    return "1 linear" if linears == 1 else f"{linears} linears"


def _lines(facts: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<15} {value}" for name, value in facts)
