"""``omniw4 bench [DIR]``: how long the ops and the model take, against the unquantized ones in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omniw4.cli import options
from omniw4.cli.linear_report import linear_tables
from omniw4.cli.omnivoice_report import omnivoice_tables
from omniw4.cli.output import clock, figure, size, table
from omniw4.errors import VerdictError

if TYPE_CHECKING:
    from omniw4.bench.result import BenchResult
    from omniw4.bench.timing import Timing


def command(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Checkpoint folder; without it the shapes of OmniVoice.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The original: folder, .gguf file, or Hub name.")
    ] = None,
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            metavar="PART",
            help="ops, model, quantize, backbone, omnivoice, linear; default: ops, and model with --model.",
        ),
    ] = None,
    shapes: Annotated[str | None, typer.Option("--shapes", metavar="MxNxK,...", help="Shapes of the ops.")] = None,
    prefill: Annotated[
        str | None, typer.Option("--prefill", metavar="BxS,...", help="Batches and lengths of whole forwards.")
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engines",
            metavar="NAME",
            help="Of --what backbone: hf-eager, hf-graph, hf-compiled, fp16, ...; of omnivoice: package, fp16, ...",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="P,...", help="Tokens of a step of --what backbone, of a product of linear."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="NAME", help="Kernel family; without it the best one compiled for the GPU."),
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option("--repetitions", metavar="N", min=1, help="Timed repetitions a case.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", metavar="N", min=0, help="Repetitions that do not count.")
    ] = None,
    workdir: Annotated[
        Path | None, typer.Option("--workdir", metavar="DIR", help="Where --what quantize puts its temporary folder.")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check each op against FP64, then time it; exit code 1 when one was wrong. On a CPU the references are timed."""
    parts = [part for text in what or [] for part in text.split(",")]
    if not parts:
        parts = ["ops", "model"] if directory is not None and model is not None else ["ops"]
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4.bench.backbone import parse_tokens
    from omniw4.bench.linear import parse_shapes
    from omniw4.bench.model import parse_prefill
    from omniw4.bench.run import run

    options.check_device(device)
    with output.progress("timing") as bar:
        result = run(
            directory,
            model,
            what=parts,
            shapes=parse_shapes(shapes) if shapes else None,
            prefill=parse_prefill(prefill) if prefill else None,
            layout=layout,
            engines=[name for text in engines or [] for name in text.split(",")] or None,
            tokens=parse_tokens(tokens) if tokens else None,
            device=device,
            dtype=dtype,
            warmup=warmup,
            repetitions=repetitions,
            workdir=workdir,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
            on_progress=lambda p: bar.step(p.done, p.total, p.detail, title=p.stage),
        )
    output.result(report(result), result.to_dict())
    if not result.passed:
        wrong = [f"{row.op} {row.m}×{row.n}×{row.k}" for row in result.ops if not row.checked]
        wrong += [f"model {row.batch}×{row.seq_len}" for row in result.model if not row.checked]
        wrong += [f"{row.name}, M {row.m}" for row in result.linear if not row.checked]
        wrong += [f"backbone {row.engine} at P={row.tokens}" for row in result.backbone if not row.checked]
        wrong += [f"omnivoice {row.engine}, batch {row.batch}" for row in result.omnivoice if not row.checked]
        raise VerdictError(
            f"wrong output, not timed: {', '.join(wrong)}",
            hint="the notes of --json say by how much; a GPU's kernels are compiled anew by `make kernels`",
        )


def report(result: BenchResult) -> str:
    """Tables under one line of environment."""
    parts = ["\n".join([result.environment.line(), *(f"note: {note}" for note in result.notes)])]
    if result.ops:
        parts.append(_op_table(result))
    if result.model:
        header = ("model", "batch", "tokens", "mode", "ms quantized", "± σ", "ms original", "× original", "rel. error")
        rows = [
            (
                *(row.path, str(row.batch), str(row.seq_len), row.mode, _ms(row.quantized)),
                *(_spread(row.quantized, 1000), _ms(row.original), figure(row.speedup, ".2f")),
                figure(row.relative_error, ".4f") if row.checked else "WRONG",
            )
            for row in result.model
        ]
        parts.append(table(header, rows))
    if result.quantize:
        costs = [(r.what, clock(r.seconds), clock(r.cpu_seconds), size(r.peak_rss_bytes)) for r in result.quantize]
        parts.append(table(("verb", "time", "CPU", "peak memory"), costs))
    if result.backbone:
        parts.append(_backbone_table(result))
    if result.linear:
        parts += linear_tables(result)
    if result.omnivoice:
        parts += omnivoice_tables(result.omnivoice)
    return "\n\n".join(parts)


def _backbone_table(result: BenchResult) -> str:
    baselines = [name for name in ("hf-eager", "hf-graph", "hf-compiled", "fp16", "fp8") if _has(result, name)]
    header = (
        "engine",
        "P",
        "bucket",
        "ms",
        "± σ",
        *(f"× {name}" for name in baselines),
        "rel. error",
        "weights",
        "all",
    )
    rows = [
        (
            *(row.engine, str(row.tokens), str(row.bucket)),
            figure(row.timing.median / 1000 if row.timing else None, ".3f") if row.checked else "WRONG",
            _spread(row.timing, 1000),
            *(figure(row.speedups.get(name), ".2f") for name in baselines),
            figure(row.error, ".4f"),
            *(size(n) if n else "-" for n in (row.weight_bytes, row.total_bytes)),
        )
        for row in sorted(result.backbone, key=lambda row: row.tokens)
    ]
    attention = " · ".join(sorted({row.attention for row in result.backbone if row.attention}))
    notes = [f"note: {row.engine} at P={row.tokens}: {row.note}" for row in result.backbone if row.note]
    return "\n\n".join(filter(None, (table(header, rows), f"attention of the engine: {attention}", "\n".join(notes))))


def _has(result: BenchResult, engine: str) -> bool:
    return any(row.engine == engine for row in result.backbone)


def _op_table(result: BenchResult) -> str:
    header = ("op", "M", "N", "K", "µs p50", "± σ", "TOPS", "GB/s", "op/byte", "% of roofline", "vs fp16")
    rows = [
        (
            *(row.op, str(row.m), str(row.n), str(row.k)),
            *(
                figure(row.timing.median if row.timing else None, ".1f") if row.checked else "WRONG",
                _spread(row.timing),
            ),
            *(figure(row.tops, ".3f"), figure(row.gbs, ".2f"), f"{row.intensity:.1f}", figure(row.roofline, ".1%")),
            figure(row.speedup, ".2f"),
        )
        for row in result.ops
    ]
    baseline = f"vs fp16: torch's linear in {result.dtype} at the same shape over this; above 1 is faster"
    return f"{table(header, rows)}\n\n{baseline} · ran: {result.path}"


def _ms(timing: Timing | None) -> str:
    return figure(timing.median / 1000 if timing else None, ".2f")


def _spread(timing: Timing | None, unit: float = 1) -> str:
    return figure(timing.std / unit if timing else None, ".1f" if unit == 1 else ".2f")
