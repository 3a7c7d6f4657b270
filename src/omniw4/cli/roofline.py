"""``omniw4 roofline [MODEL]``: what a forward costs on a GPU at every width, before any kernel is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4.cli import options
from omniw4.cli.output import figure, table
from omniw4.errors import UsageError

if TYPE_CHECKING:
    from omniw4.roofline import Backbone, Gpu, Roofline

MOST_TOKENS = 1 << 20
_TITLES = {"fp16": "FP16", "fp8": "FP8", "w4a8": "W4A8", "w4a4": "W4A4"}


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Model folder, .gguf file, Hub name or checkpoint; without it OmniVoice's backbone."
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option("--gpu", metavar="NAME", help="L4, A100, RTX4090, H100, H200; auto: the one here, measured."),
    ] = "H200",
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="M,...", help="Tokens of a forward, at most 1048576.")
    ] = "704",
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="Sequences that attention sees, of equal length.")
    ] = 1,
    rank: Annotated[
        int,
        typer.Option("--rank", metavar="N", min=0, max=256, help="Of the low-rank branch, but for a checkpoint."),
    ] = 16,
    causal: Annotated[bool, typer.Option("--causal", help="Attention computes half of the square.")] = False,
    fused: Annotated[
        bool, typer.Option("--fused", help="What a fused engine launches: q/k/v as one linear, gate/up as one.")
    ] = False,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="The bare roofline: no launches, no half-filled GPU, no share of the peak.")
    ] = False,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Operations, bytes, bound and time of every linear, attention and norm at FP16, FP8, W4A8 and W4A4."""
    output = options.start(json_mode=json_mode, quiet=quiet)
    counts = parse_tokens(tokens)
    if (fewest := min(counts)) < sequences:
        raise UsageError(
            f"{fewest} tokens are fewer than {sequences} sequences",
            hint="raise --tokens, which counts those of all sequences, or lower --sequences",
        )

    from omniw4 import roofline

    chosen = _measured() if gpu.lower() == "auto" else roofline.get(gpu)
    backbone = _backbone(model, rank, gguf_file, trust_remote_code)
    results = [
        roofline.compute(backbone, chosen, count, sequences=sequences, causal=causal, fused=fused) for count in counts
    ]
    parts = [_head(backbone, chosen), *(_report(result, ideal=ideal) for result in results)]
    output.result("\n\n".join(parts), [r.to_dict() for r in results] if len(results) > 1 else results[0].to_dict())


def parse_tokens(text: str) -> list[int]:
    """``"256,704"`` to ``[256, 704]``; raises UsageError for anything else than numbers from 1 to ``MOST_TOKENS``."""
    counts = []
    for part in text.split(","):
        digits = part.strip().lstrip("0")
        if not digits.isdecimal():
            raise UsageError(f"--tokens wants positive numbers, found {text!r}", hint="such as `--tokens 256,704,2048`")
        if len(digits) > len(str(MOST_TOKENS)) or int(digits) > MOST_TOKENS:
            shown = digits if len(digits) <= 24 else f"a number of {len(digits)} digits"
            raise UsageError(
                f"--tokens wants at most {MOST_TOKENS} tokens a forward, found {shown}",
                hint="such as `--tokens 256,704,2048`",
            )
        counts.append(int(digits))
    return counts


def _measured() -> Gpu:
    if options.gpu_capability() is None:
        raise UsageError("--gpu auto: this machine has no CUDA device", hint="name one, such as `--gpu L4`")
    import torch

    from omniw4.bench.timing import measure
    from omniw4.roofline.measure import measured

    return measured(torch.device("cuda"), lambda calls, device: measure(calls, device, repetitions=10).min)


def _backbone(model: str | None, rank: int, gguf_file: str | None, trust_remote_code: bool) -> Backbone:
    from omniw4 import roofline

    if model is None:
        return roofline.omnivoice(rank)
    if (Path(model) / "omniw4.json").is_file():
        return roofline.of_checkpoint(model)
    return roofline.of_source(model, rank, gguf_file=gguf_file, trust_remote_code=trust_remote_code)


def _head(backbone: Backbone, gpu: Gpu) -> str:
    rates = " · ".join(
        f"{name.upper()} {rate:.0f}" if rate else f"{name.upper()} none" for name, rate in gpu.rates.items()
    )
    ridges = " · ".join(f"{name.upper()} {ridge:.0f}" for name in gpu.rates if (ridge := gpu.ridge(name)))
    lines = [
        f"{backbone.name} on {gpu.name} (sm{gpu.capability.replace('.', '')}, {gpu.multiprocessors} multiprocessors)",
        f"10^12 operations a second: {rates}; memory {gpu.memory_gbs:.0f} GB/s",
        f"ridge points, operations a byte: {ridges}",
        *(f"source: {source}" for source in gpu.sources),
    ]
    if gpu.rates["int4"] is None:
        lines.append("W4A4: INT4 operands are widened and multiplied as INT8 on this GPU")
    return "\n".join(lines)


def _report(result: Roofline, *, ideal: bool) -> str:
    header = (
        "op",
        "×",
        "shape",
        "GFLOP",
        "MB",
        "FLOP/byte",
        "bound",
        *(f"{t} µs" for t in _TITLES.values()),
        "W4A4 is",
    )
    rows = [
        (
            *(row.op, str(row.count), row.shape, figure(row.ops * 1e-9, ".2f"), f"{row.bytes * 1e-6:.2f}"),
            *(f"{row.intensity:.0f}", row.bound, *(_time(row.times[w], ideal=ideal) for w in _TITLES)),
            _times(row.speedup("w4a4", ideal=ideal)),
        )
        for row in result.rows
    ]
    sums = {w: result.total_us(w, ideal=ideal) for w in _TITLES}
    linears = {w: result.total_us(w, ideal=ideal, kind="linear") for w in _TITLES}
    for name, of in (("linears, ms", linears), ("forward, ms", sums)):
        cells = [figure(us / 1000 if us is not None else None, ".3f") for us in of.values()]
        base, last = of["fp16"], of["w4a4"]
        rows.append((name, "", "", "", "", "", "", *cells, _times(base / last if base and last else None)))
    kind = "the bare roofline, which no kernel beats" if ideal else "what good kernels in a CUDA graph should take"
    fused = ", fused" if result.fused else ""
    title = f"{result.tokens} tokens{fused}; times are {kind}"
    return f"{title}\n\n{table(header, rows, left=1)}"


def _time(time: Any, *, ideal: bool) -> str:
    if time is None:
        return "-"
    if not time.kernels:
        return "inside"
    return f"{time.ideal_us if ideal else time.predicted_us:.1f}"


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"
