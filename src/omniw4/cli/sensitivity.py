"""``omniw4 sensitivity DIR --model MODEL``: which linears 8-bit activations would help most, and a recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4.cli import options
from omniw4.cli.output import table
from omniw4.errors import OutputExistsError, UsageError

if TYPE_CHECKING:
    from omniw4.verify.sensitivity import Sensitivity

_SHOWN = 10


def command(
    directory: options.Checkpoint,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="The original: folder, .gguf file, or Hub name.")
    ],
    dataset: options.Dataset = None,
    windows: Annotated[int, typer.Option("--windows", metavar="N", min=1, help="Held-out windows.")] = 4,
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="N", min=8, help="Tokens a window.")] = 512,
    share: Annotated[
        float, typer.Option("--share", metavar="X", min=0, max=1, help="Share that may get 8-bit activations.")
    ] = 0.25,
    by: Annotated[
        str, typer.Option("--by", metavar="NAME", help="What the share is of: count (of linears) or weights (time).")
    ] = "count",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the mixed recipe here, for `--config FILE`.")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure linear by linear what 8-bit activations are worth, and write the recipe that spends a share on them."""
    if by not in ("count", "weights"):
        raise UsageError(f"--by is {by!r}", hint="use count or weights")
    if out is not None and out.exists():
        raise OutputExistsError(f"output {str(out)!r} exists", hint="give --out another name")
    output = options.start(json_mode=json_mode, quiet=quiet)

    import yaml

    from omniw4 import model as models
    from omniw4.checkpoint import Checkpoint
    from omniw4.storage import atomic_write
    from omniw4.verify import heldout
    from omniw4.verify.run import require_linears, same_source
    from omniw4.verify.sensitivity import measure_sensitivity

    options.check_device(device)
    checkpoint = Checkpoint.open(directory)
    source = models.load(model, dtype=dtype, device=device, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    require_linears(source.model, checkpoint, source.source)
    if not (gate := same_source(checkpoint, source)).passed:
        output.warn(
            f"{gate.detail}: gains say nothing then", "give the model that the checkpoint was made from with --model"
        )
    if all(spec.act_bits != 4 for spec in checkpoint.specs.values()):
        raise UsageError(
            f"checkpoint {directory.name!r} has no linear with 4-bit activations, so none can gain from 8",
            hint="give a W4A4 checkpoint, such as one of the default recipe",
        )
    data = heldout.prepare(
        source,
        dataset,
        windows,
        seq_len,
        None,
        checkpoint.provenance["calibration"],
        checkpoint.provenance["distillation"],
    )
    for warning in data.warnings:
        output.warn(warning)
    forward = data.forward(source.model)
    prefix = next((f"{p}." for p, m in source.model.named_modules() if p and m is forward.model), "")
    linears = {path.removeprefix(prefix): checkpoint.linear(path) for path in checkpoint.specs}
    with output.progress("measuring") as bar:
        found = measure_sensitivity(
            forward.model,  # type: ignore[arg-type]
            linears,
            data.items,
            device=device,
            on_linear=lambda done, total, path: bar.step(done, total, path),
        )
    chosen = [f"{prefix}{path}" for path in found.choose(share, by=by)]
    recipe = with_int8(checkpoint.recipe, chosen)
    if out is not None:
        atomic_write(out, yaml.safe_dump({"recipe": recipe}, sort_keys=False, allow_unicode=True))
    document = {
        "kind": found.kind,
        "baseline": found.baseline,
        "all_at_8": found.all_at_8,
        "gains": [{"path": f"{prefix}{g.path}", "gain": g.gain, "weights": g.weights} for g in found.gains],
        "chosen": chosen,
        "windows": data.record,
    }
    output.result(_text(found, prefix, chosen, out), document)


def with_int8(recipe: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The recipe with INT8 activations, over their whole range, for these linears."""
    added = [{"pattern": path, "act_bits": 8, "act_clip": 1.0} for path in paths]
    return {**recipe, "overrides": [*recipe.get("overrides", []), *added]}


def _text(found: Sensitivity, prefix: str, chosen: list[str], out: Path | None) -> str:
    what = "KL" if found.kind == "logits" else "relative error"
    rows = [(f"{prefix}{g.path}", f"{g.gain:.5f}", f"{g.gain / found.baseline:.1%}") for g in found.gains[:_SHOWN]]
    parts = [
        table(("linear", f"{what} less", "of all"), rows),
        f"{what} {found.baseline:.4f} as it is, {found.all_at_8:.4f} with 8-bit activations everywhere",
        f"{len(chosen)} of {len(found.gains)} linears chosen",
    ]
    if out is not None:
        parts.append(f"Wrote {out} · next: omniw4 quantize MODEL --stats DIR --config {out} --out DIR")
    return "\n\n".join(parts)
