"""``omniw4 quantize MODEL --stats DIR --out DIR``: a checkpoint, layer by layer, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4 import __version__
from omniw4.cli import distilling, layer_report, options, plan_report, processes, settings
from omniw4.cli.output import Output
from omniw4.errors import OmniW4Error, StatsError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omniw4.calibrate import Stats
    from omniw4.config import Recipe
    from omniw4.model import LoadedModel
    from omniw4.quantize.pipeline import WeightSource
    from omniw4.quantize.plan import Plan
    from omniw4.storage import OutputFolder
    from omniw4.tensors import LayerReport, QuantizedLinear

_MUCH = 0.05  # share of weights that no linear holds from which on it is worth a warning
_MARKER = "omniw4.json"  # what every checkpoint holds


def command(
    model: options.Model,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write; it appears when it is complete.")
    ] = None,
    stats: Annotated[Path | None, typer.Option("--stats", metavar="DIR", help="What `omniw4 calibrate` wrote.")] = None,
    config: options.Config = None,
    assignments: options.Set = [],  # noqa: B006
    include: Annotated[
        list[str], typer.Option("--include", metavar="PATTERN", help="Linears to quantize; else all of the blocks.")
    ] = [],  # noqa: B006
    skip: Annotated[list[str], typer.Option("--skip", metavar="PATTERN", help="Linears to leave as they are.")] = [],  # noqa: B006
    override: Annotated[
        list[str],
        typer.Option("--override", metavar="PATTERN:KEY=VALUE,...", help="Another recipe for some linears."),
    ] = [],  # noqa: B006
    distill_steps: Annotated[
        int | None,
        typer.Option("--distill-steps", metavar="N", min=0, help="Train low-rank branch and scales; 0 is off."),
    ] = None,
    distill_dataset: Annotated[
        str | None,
        typer.Option("--distill-dataset", metavar="TEXT", help="Text to distil on, as `omniw4 calibrate` takes it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: options.Overwrite = False,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file, such as 500MiB.")
    ] = "5GB",
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize the linears of a model to W4A4 with a low-rank correction; `--config rtn` needs no --stats."""
    flags = {"recipe": {"distill": {"steps": distill_steps}}}
    recipe = settings.with_patterns(settings.load(config, assignments, flags), include, skip, override).recipe
    if distill_dataset is not None and not recipe.distill.steps:
        raise UsageError("--distill-dataset is given, but nothing is distilled", hint="add --distill-steps 200")
    if out is None and not dry_run:
        raise UsageError("--out is missing", hint="name the folder to write, or look at the plan with --dry-run")
    team = processes.find()
    output = options.start(json_mode=json_mode, quiet=quiet or not team.first)

    from omniw4 import model as models
    from omniw4 import storage
    from omniw4.checkpoint import parse_size
    from omniw4.quantize.pipeline import check_finite
    from omniw4.quantize.plan import make_plan

    device = team.join(device)
    options.check_device(device)
    models.check_dtype(dtype)
    shard_size = parse_size(max_shard_size)
    opening: dict[str, Any] = {"dtype": dtype, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    if out is not None and not dry_run and team.first:
        options.check_inputs_apart(out, model=model, stats=stats, dataset=distill_dataset, config=config)
        storage.OutputFolder.check(out, overwrite=overwrite, marker=_MARKER)
    skeleton = models.skeleton(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    plan = make_plan(models.shapes(skeleton), recipe, models.block_linears(skeleton))
    model_hash = models.source_hash(model, gguf_file=gguf_file)
    found = _open_stats(stats, plan, model_hash, Path(model).name, optional=dry_run)
    warnings = [*plan.warnings(), *_left_out(models.other_matrices(skeleton), plan)]
    for text, hint in warnings:
        output.warn(text, hint)
    if out is None or dry_run:
        total = sum(p.numel() for p in skeleton.parameters())
        streamed = models.stream(model, **opening) if not recipe.distill.steps else None
        if streamed is not None:
            check_finite({e.path: partial(streamed.linear, e.path) for e in plan.quantized}, plan)
        resident = models.resident_bytes(skeleton, dtype) if streamed is None else 0
        told = plan_report.document(plan, recipe, found.group_of if found else None, total, resident, device)
        output.result(plan_report.text(plan, told), {**told, "warnings": [text for text, _ in warnings]})
        return
    distill_text = distilling.Text(distill_dataset) if recipe.distill.steps else None
    if distill_text is not None and team.first:
        bos = (found.fingerprint.get("data", {}) if found else {}).get("bos", {}).get("policy", "model")
        policy = bos if bos in ("always", "never") else "model"
        tokenizer = models.tokenizer(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
        distill_text.measure(Path(model).name, skeleton, tokenizer, recipe.distill, policy)
    del skeleton
    fingerprint = {
        "verb": "quantize",
        "omniw4": __version__,
        "model": model_hash,
        "recipe": recipe.model_dump(mode="json"),
        "calibration": found.fingerprint if found else None,
        "distill_text": distill_text.hash if distill_text else None,
        "max_shard_size": shard_size,
        "device": device.partition(":")[0],
        "dtype": dtype,
    }

    def unchanged(loaded: LoadedModel) -> None:
        models.check_unchanged(loaded, model_hash, gguf_file=gguf_file)

    def load() -> tuple[LoadedModel, dict[str, WeightSource]]:
        streamed = models.stream(model, **opening) if not recipe.distill.steps else None
        loaded = models.load(model, **opening) if streamed is None else streamed.loaded
        unchanged(loaded)
        if streamed is not None:
            return loaded, {e.path: partial(streamed.linear, e.path) for e in plan.quantized}
        linears = models.find_linears(loaded.model)
        return loaded, {e.path: partial(_weights_of, linears[e.path]) for e in plan.quantized}

    if not team.first:
        team.wait()  # until the folder is there
        _quantize_share(load, storage.OutputFolder.partial_of(out), plan, recipe, found, device, team)
        return
    with (
        storage.OutputFolder.begin(out, fingerprint, overwrite=overwrite, resume=resume, marker=_MARKER) as folder,
        options.interruptible(lambda: _kept(folder, len(plan.quantized))),
        _naming_what_is_kept(folder, len(plan.quantized)),
    ):
        team.wait()
        document, text = _quantize(
            load, unchanged, folder, plan, recipe, found, distill_text, shard_size, device, output, team
        )
    document["warnings"] = [*(told for told, _ in warnings), *document["warnings"]]
    output.result(text.replace("OUT", str(out), 1), {"out": str(out), **document})


def _quantize(
    load: Callable[[], tuple[LoadedModel, dict[str, WeightSource]]],
    unchanged: Callable[[LoadedModel], None],
    folder: OutputFolder,
    plan: Plan,
    recipe: Recipe,
    stats: Stats | None,
    distill_text: distilling.Text | None,
    shard_size: int,
    device: str,
    output: Output,
    team: processes.Processes,
) -> tuple[dict[str, Any], str]:
    """The run between the checks and the result: document and text of it, ``OUT`` standing for the folder."""
    from omniw4.checkpoint import Checkpoint, LayerStore, assemble
    from omniw4.quantize.pipeline import Progress, check_finite, quantize_model

    began = time.monotonic()
    store = LayerStore(folder.partial)
    done = store.done()
    if done:
        output.note(f"resuming: {len(done)} of {len(plan.quantized)} linears are done and skipped")
    elif folder.resumed:
        output.note("resuming: no linear was finished, all are made")
    loaded, weights = load()
    output.note(layer_report.headline(recipe, plan, device))
    check_finite(weights, plan)
    with output.progress("quantizing") as bar:
        bar.start_at(len(done))

        def tell(progress: Progress) -> None:
            r = progress.report
            bar.step(progress.done, progress.total, f"{r.path}  sqnr {r.sqnr_db:.1f} dB")

        quantize_model(
            weights,
            plan,
            recipe,
            stats.linear if stats else lambda _: None,
            store.put,
            done,
            tell,
            group_of=stats.group_of if stats else None,
            device=device,
            part=(team.rank, team.world),
        )
    team.wait()
    if not team.alone:
        store = LayerStore(folder.partial)  # with what the others made
    reports = [store.report(e.path) for e in plan.quantized]
    output.note("\n" + layer_report.table_of(reports) + "\n")
    layer_report.warn(reports, output)
    distillation = None
    if distill_text is not None:
        store, distillation = distilling.distil(loaded, store, recipe.distill, distill_text, folder, device, output)
    assemble(
        folder.result,
        store,
        loaded,
        recipe=recipe.model_dump(mode="json"),
        calibration=stats.fingerprint if stats else None,
        distillation=distillation,
        skipped={e.path: e.skip_reason for e in plan.skipped},
        max_shard_size=shard_size,
    )
    unchanged(loaded)  # what is not quantized was copied last
    checkpoint = Checkpoint.open(folder.commit())
    return layer_report.summary(checkpoint, reports, plan, time.monotonic() - began)


def _quantize_share(
    load: Callable[[], tuple[LoadedModel, dict[str, WeightSource]]],
    partial_folder: Path,
    plan: Plan,
    recipe: Recipe,
    stats: Stats | None,
    device: str,
    team: processes.Processes,
) -> None:
    """The linears of a process that is not the first, into the folder of the first."""
    from omniw4.checkpoint import LayerStore
    from omniw4.quantize.pipeline import quantize_model

    first, store = processes.FirstProcess(partial_folder), LayerStore(partial_folder)

    def put(path: str, linear: QuantizedLinear, report: LayerReport) -> None:
        first.check()
        store.put(path, linear, report)

    with options.interruptible("the linears that were finished are kept"):
        quantize_model(
            load()[1],
            plan,
            recipe,
            stats.linear if stats else lambda _: None,
            put,
            store.done(),
            group_of=stats.group_of if stats else None,
            device=device,
            part=(team.rank, team.world),
        )
        team.wait()


@contextmanager
def _naming_what_is_kept(folder: OutputFolder, total: int) -> Iterator[None]:
    """Errors that stop a run (a full disk, damaged statistics) say that finished linears are kept."""
    try:
        yield
    except options.Interrupted:
        raise
    except OmniW4Error as e:
        sentence, hint = _kept(folder, total)
        if hint:
            e.hint = "; ".join(filter(None, (e.hint, f"{sentence}: {hint}")))
        raise


def _kept(folder: OutputFolder, total: int) -> tuple[str, str]:
    """What an interrupted run leaves, and how to go on."""
    from omniw4.checkpoint import LayerStore

    done = len(LayerStore(folder.partial).done())
    if not done:
        return "no linear was finished, nothing is kept", ""
    return f"{done} of {total} linears are kept in {folder.partial.name}/", "go on with --resume"


def _open_stats(folder: Path | None, plan: Plan, model_hash: str, name: str, *, optional: bool) -> Stats | None:
    """The statistics a plan needs, known to be of this model; None for a data-free recipe."""
    from omniw4.calibrate import Stats

    if not plan.needs_stats or (folder is None and optional):
        return None
    if folder is None:
        raise UsageError(
            "this recipe needs calibration statistics",
            hint="run `omniw4 calibrate MODEL --out DIR` and give `--stats DIR`, or use the data-free `--config rtn`",
        )
    stats = Stats.open(folder)
    stats.check_model(model_hash, name)
    missing = [e.path for e in plan.quantized if e.path not in set(stats.paths)]
    if missing:
        raise StatsError(
            f"the statistics in {str(folder)!r} lack {len(missing)} of the linears to quantize, such as {missing[0]}",
            hint="calibration covers the model's repeated blocks; leave others out with --skip",
        )
    return stats


def _left_out(others: dict[str, int], plan: Plan) -> list[tuple[str, str]]:
    """A warning where much of the blocks is in no linear, so that little of the model is quantized."""
    quantized, rest = sum(entry.weights for entry in plan.quantized), sum(others.values())
    if rest < _MUCH * (quantized + rest):
        return []
    share = f"{rest / (quantized + rest):.0%}"
    text = f"{share} of the weights stay as they are, as no nn.Linear holds them, such as {next(iter(others))}"
    return [(text, "omniw4 quantizes linears alone, and no experts that are stacked in one tensor")]


def _weights_of(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
