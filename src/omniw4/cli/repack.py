"""``omniw4 repack DIR``: the checkpoint in the order in which a kernel family reads it, cached beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from omniw4.cli import options
from omniw4.cli.output import size


def command(
    directory: options.Checkpoint,
    layout: Annotated[
        str, typer.Option("--layout", metavar="NAME", help="mma_s4, mma_s8, wgmma_s8, or auto: the one for the GPU.")
    ] = "auto",
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="NAME", help="The GPU that auto means, such as 90; without it the one here."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Pack anew even when a valid cache is there.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete caches that can no longer be used.")] = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Pack a checkpoint for tensor cores; the runtime does it by itself when the cache is missing."""
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import repack
    from omniw4.checkpoint import Checkpoint
    from omniw4.repack import cache

    capability = repack.parse_arch(arch) if arch else options.gpu_capability()
    checkpoint = Checkpoint.open(directory)
    specs = checkpoint.specs.values()
    name = repack.auto(capability, specs) if layout == "auto" else repack.get(layout).LAYOUT
    removed = cache.delete_stale(directory, checkpoint.hash) if prune else []
    with output.progress("repacking") as bar:
        report = cache.write(directory, checkpoint, name, overwrite=overwrite, on_progress=bar.step)
    if report.reused:
        checkpoint.check_hashes()  # a cache that was there says nothing about the weights beside it
        if damaged := cache.damaged(directory, checkpoint, name):  # and its bytes have no hash
            output.note(
                f"the cache held {len(damaged)} linears, such as {damaged[0]}, otherwise than they are: made anew"
            )
            with output.progress("repacking") as bar:
                report = cache.write(directory, checkpoint, name, overwrite=True, on_progress=bar.step)
    if layout == "auto":
        output.note(repack.explain_auto(capability, specs))
    for entry in removed:
        output.note(f"deleted {entry.file.name} ({size(entry.bytes)})")
    for path, reason in report.skipped.items():
        output.note(f"{path} stays canonical: {reason}")
    done = "is there already" if report.reused else "written"
    output.result(
        f"{report.file} {done} · {name} v{report.version} · {report.linears} linears · {size(report.bytes)}",
        {**asdict(report), "removed": [asdict(entry) for entry in removed]},
    )
