"""``omniw4 export DIR``: a checkpoint as a plain Hugging Face model, or as the seed's single file."""

from __future__ import annotations

from typing import Annotated

import typer

from omniw4 import __version__
from omniw4.cli import options
from omniw4.cli.output import size
from omniw4.errors import UsageError

_FORMATS = ("hf", "seed")


def command(
    directory: options.Checkpoint,
    out: options.Out,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="A plain Hugging Face model; the same as --format hf.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="hf: a plain model; seed: w4a4_checkpoint.safetensors."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Largest file of a plain model.", show_default="5GB"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="Of dequantized weights.", show_default="the model's own"),
    ] = None,
    overwrite: options.Overwrite = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a checkpoint in another form: dequantized for any Hugging Face tool, or the original project's file."""
    chosen = _choose(form, dequantize)
    if chosen == "seed":
        _refuse({"--dtype": dtype, "--max-shard-size": max_shard_size})
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import model as models
    from omniw4 import storage
    from omniw4.checkpoint import MAX_SHARD_SIZE, Checkpoint, parse_size
    from omniw4.checkpoint.export import NOTE, export_dequantized, export_seed

    models.check_dtype(dtype or "auto")
    shard_size = MAX_SHARD_SIZE if max_shard_size is None else parse_size(max_shard_size)
    checkpoint = Checkpoint.open(directory)
    checkpoint.check_hashes()
    options.check_inputs_apart(out, checkpoint=directory)
    fingerprint = {"verb": "export", "omniw4": __version__, "checkpoint": checkpoint.hash, "format": chosen}
    with (
        storage.OutputFolder.begin(out, fingerprint, overwrite=overwrite, marker=NOTE, resumable=False) as folder,
        output.progress("exporting") as bar,
    ):
        if chosen == "seed":
            export_seed(checkpoint, folder.result, on_linear=bar.step)
            stored = "float16"
        else:
            wanted = models.DTYPES.get(dtype or "auto")
            used = export_dequantized(
                checkpoint, folder.result, dtype=wanted, max_shard_size=shard_size, on_linear=bar.step
            )
            stored = str(used).removeprefix("torch.")
        written = folder.commit()
    total = sum(file.stat().st_size for file in written.rglob("*.safetensors"))
    document = {
        "out": str(out),
        "format": chosen,
        "dtype": stored,
        "linears": len(checkpoint.specs),
        "bytes": total,
        "files": sorted(str(file.relative_to(written)) for file in written.rglob("*") if file.is_file()),
    }
    what = "the seed's format" if chosen == "seed" else f"a plain model in {stored}"
    output.result(f"Wrote {out}/ · {what} · {len(checkpoint.specs)} linears · {size(total)}", document)


def _choose(form: str | None, dequantize: bool) -> str:
    if form is not None and form not in _FORMATS:
        raise UsageError(f"unknown format {form!r}", hint=f"--format takes {' or '.join(_FORMATS)}")
    if dequantize and form == "seed":
        raise UsageError(
            "--dequantize and --format seed exclude each other", hint="the seed's format holds INT4 codes: drop one"
        )
    if form is None and not dequantize:
        raise UsageError("what to export is missing", hint="--dequantize for a plain model, or --format seed")
    return form or "hf"


def _refuse(flags: dict[str, str | None]) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(
                f"{flag} is for a plain model, and --format seed writes one file of INT4 codes in float16",
                hint=f"leave out {flag}, or export with --dequantize",
            )
