"""``omniw4 sweep MODEL --recipe ... --out DIR``: quantize one model by several recipes and compare them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from omniw4.cli import options, settings, sweep_runs
from omniw4.cli.output import table
from omniw4.cli.sweep_runs import RESULTS, Candidate, Judge, Run
from omniw4.errors import ModelError, OutputExistsError, UsageError

_MARKDOWN, _PAGE = "sweep.md", "sweep.html"

Calibration = tuple[Path | None, Any]  # folder of statistics and their fingerprint


def command(
    model: options.Model,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder of the table; run again, it goes on where it stopped.")
    ],
    recipe: Annotated[
        list[str],
        typer.Option(
            "--recipe",
            metavar="NAME|LABEL=NAME[,KEY=VALUE...]",
            help="A config by name or file, with keys set, such as r32=default,recipe.lowrank.rank=32; repeat.",
        ),
    ] = [],  # noqa: B006
    stats: Annotated[
        list[Path],
        typer.Option("--stats", metavar="DIR", help="What `omniw4 calibrate` wrote; repeat for the spread over them."),
    ] = [],  # noqa: B006
    merge: Annotated[
        list[Path],
        typer.Option("--merge", metavar="DIR", help="Take over what another sweep measured alike; repeat."),
    ] = [],  # noqa: B006
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="LABEL", help="Whom the others differ from; else the table's first."),
    ] = None,
    dataset: Annotated[
        list[str],
        typer.Option("--dataset", metavar="TEXT", help="Held-out text; repeat for several. Else the built-in one."),
    ] = [],  # noqa: B006
    prompts: options.Prompts = None,
    num_step: options.NumStep = 32,
    distill_dataset: Annotated[
        str | None, typer.Option("--distill-dataset", metavar="TEXT", help="Text for the recipes that distil.")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", metavar="N", min=1, help="Held-out windows a text.")] = 16,
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="N", min=8, help="Tokens a window.")] = 1024,
    overwrite: options.Overwrite = False,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="No plot; needs no matplotlib.")] = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare recipes on one model: quality, spread over calibrations, bits and seconds, as a table and a plot."""
    chosen = [_candidate(text) for text in recipe]
    labels = [candidate.label for candidate in chosen]
    if len(set(labels)) < len(labels):
        raise UsageError(f"two recipes are called {max(labels, key=labels.count)!r}", hint="give one a LABEL=")
    if not chosen and not merge:
        raise UsageError(
            "nothing to compare", hint="give --recipe, such as `--recipe default --recipe rtn`, or --merge"
        )
    if dataset and prompts is not None:
        raise UsageError("--dataset and --prompts exclude each other", hint="--prompts is for an OmniVoice")
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import model as models
    from omniw4.report import plots
    from omniw4.storage import OutputFolder, atomic_write_json

    options.check_device(device)
    if not no_plots:
        plots.require()
    skeleton = models.skeleton(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    if prompts is None:
        models.check_positions(skeleton, seq_len)
        texts: list[str | None] = [*dataset] or [None]
    else:
        _check_omnivoice(skeleton, model)
        texts = []
    del skeleton
    opening = {"device": device, "dtype": dtype, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    judge = Judge(model, texts, windows, seq_len, prompts, num_step, distill_dataset, opening)
    model_hash = models.source_hash(model, gguf_file=gguf_file)
    comparison = {
        "verb": "sweep",
        "model": model_hash,
        **_judged_on(judge),
        "device": device.partition(":")[0],
        "dtype": dtype,
    }
    calibrations = _calibrations(stats, model_hash, model)
    _check_stats(chosen, stats)
    known = _known(out, comparison, overwrite)
    for folder_of_others in merge:
        known = sweep_runs.merged(known, folder_of_others, comparison, {c.label: c.key for c in chosen})
    _check_baseline(baseline, [run["label"] for run in known] + labels)
    runs: list[Run] = []
    with (
        _interruptible(runs),
        OutputFolder.begin(out, comparison, resume=not overwrite, overwrite=True, marker=RESULTS) as folder,
    ):
        keys = {candidate.label: candidate.key for candidate in chosen}
        earlier = sweep_runs.union(known, sweep_runs.finished(folder.partial))
        runs += [run for run in earlier if run["key"] == keys.get(run["label"], run["key"])]
        done = {sweep_runs.identity(run) for run in runs}
        for candidate in chosen:
            for stats_folder, calibration in calibrations if candidate.recipe.needs_stats else [(None, None)]:
                run = {
                    "label": candidate.label,
                    "key": candidate.key,
                    "fingerprint": {**comparison, "stats": calibration},
                }
                if sweep_runs.identity(run) in done:
                    output.note(f"{candidate.named(stats_folder)}: measured before")
                    continue
                checkpoint = folder.partial / "checkpoints" / sweep_runs.digest(candidate, calibration)
                runs.append({**run, **judge.measure(candidate, stats_folder, checkpoint, output)})
                atomic_write_json(folder.partial / RESULTS, {"recipes": runs})
        document = _document(judge, comparison, runs, baseline)
        _write(folder.result, document, with_plots=not no_plots)
        folder.commit()
    output.result(_text(document, out), document)


def parse_recipe(text: str) -> tuple[str, str, list[str]]:
    """``LABEL=NAME,KEY=VALUE,...`` to (label, config, assignments); the label defaults to what follows it.

    Raises:
        UsageError: not of this form, or a label that is no file name.
    """
    head, *assignments = text.split(",")
    label, equals, source = head.partition("=")
    if not equals:
        label, source = text if assignments else Path(head).stem, head
    if not source or any("=" not in part for part in assignments):
        raise UsageError(
            f"--recipe wants NAME or LABEL=NAME,KEY=VALUE,..., found {text!r}",
            hint="such as `--recipe default --recipe r32=default,recipe.lowrank.rank=32`",
        )
    if not re.fullmatch(r"[\w.+=,-]+", label):
        raise UsageError(f"the label {label!r} is no file name", hint="use letters, digits and -_.+")
    return label, source, assignments


def _candidate(text: str) -> Candidate:
    label, source, assignments = parse_recipe(text)
    return Candidate(label, source, assignments, settings.load(source, assignments).recipe)


def _judged_on(judge: Judge) -> dict[str, Any]:
    """What decides the figures beside model, recipe and calibration."""
    names = {"datasets": [judge.name_of(text) for text in judge.texts or [None]]}
    if judge.prompts is None:
        return {**names, "windows": judge.windows, "seq_len": judge.seq_len}
    from omniw4.calibrate.prompts import read_prompts

    found = read_prompts(judge.prompts)
    return {**names, "prompts": {"sha256": found.sha256, "count": len(found.prompts), "num_step": judge.num_step}}


def _check_omnivoice(skeleton: Any, model: str) -> None:
    from omniw4.model.omnivoice import import_omnivoice

    if not isinstance(skeleton, import_omnivoice().OmniVoice):
        raise ModelError(
            f"model {Path(model).name!r} is a {type(skeleton).__name__}, prompts are for an OmniVoice",
            hint="judge other models on text, with --dataset",
        )


def _calibrations(folders: Sequence[Path], model_hash: str, model: str) -> list[Calibration]:
    """Statistics as they were given, known to be of this model and of calibrations that differ."""
    from omniw4.calibrate import Stats

    found: list[Calibration] = []
    for folder in folders:
        stats = Stats.open(folder)
        stats.check_model(model_hash, Path(model).name)
        for earlier, fingerprint in found:
            if fingerprint == stats.fingerprint:
                raise UsageError(
                    f"--stats {str(earlier)!r} and {str(folder)!r} are of the same calibration, which has no spread",
                    hint="calibrate with another --seed or text",
                )
        found.append((folder, stats.fingerprint))
    return found


def _check_stats(chosen: Sequence[Candidate], stats: Sequence[Path]) -> None:
    """What would end the run at a later recipe, said before the first."""
    for candidate in chosen:
        if not stats and candidate.recipe.needs_stats:
            raise UsageError(
                f"recipe {candidate.label!r} needs calibration statistics",
                hint="run `omniw4 calibrate MODEL --out DIR` and give `--stats DIR`, or compare data-free ones",
            )


def _check_baseline(baseline: str | None, labels: Sequence[str]) -> None:
    if baseline is not None and baseline not in labels:
        raise UsageError(
            f"--baseline {baseline!r} is no recipe of this comparison",
            hint=f"it has {', '.join(dict.fromkeys(labels))}",
        )


def _known(out: Path, comparison: dict[str, Any], overwrite: bool) -> list[Run]:
    """What was measured before, in a folder that will be replaced as a whole: whatever else is in it must be known.

    Raises:
        OutputExistsError: it holds another comparison or other files, and ``overwrite`` does not say to replace them.
    """
    runs = sweep_runs.finished(out)
    same = [run for run in runs if sweep_runs.comparison(run) == comparison]
    if len(same) < len(runs) and not overwrite:
        raise OutputExistsError(
            f"{str(out)!r} holds a comparison of another model, or on other texts, windows or prompts",
            hint="give --out another name, or replace it with --overwrite",
        )
    ours = (RESULTS, _MARKDOWN, _PAGE)
    # OutputFolder refuses what no comparison made
    foreign = sorted(e.name for e in out.iterdir() if e.name not in ours) if (out / RESULTS).is_file() else []
    if foreign and not overwrite:
        raise OutputExistsError(
            f"{str(out / foreign[0])!r} is not of a comparison, and the folder is replaced as a whole",
            hint="give --out another name, move it away, or replace all of it with --overwrite",
        )
    return same


@contextmanager
def _interruptible(runs: Sequence[Run]) -> Iterator[None]:
    """Ctrl-C says what of the comparison is kept, also where a recipe is being quantized."""
    try:
        with options.interruptible(""):
            yield
    except options.Interrupted as e:
        kept = f"{len(runs)} measured run{'' if len(runs) == 1 else 's'}"
        raise options.Interrupted(f"interrupted; kept: {kept}", hint="run the same command again to go on") from e


def _document(judge: Judge, comparison: dict[str, Any], runs: Sequence[Run], baseline: str | None) -> dict[str, Any]:
    from omniw4.report import sweep

    rows = sweep.rows(runs)
    baseline = baseline or rows[0]["label"]
    sweep.compare(rows, baseline)
    return {
        "model": Path(judge.model).name,
        **{key: comparison[key] for key in ("datasets", "windows", "seq_len", "prompts") if key in comparison},
        "recipes": rows,
        "front": sweep.front(rows),
        "baseline": baseline,
    }


def _write(folder: Path, document: dict[str, Any], *, with_plots: bool) -> None:
    from omniw4.report import sweep_pages
    from omniw4.storage import atomic_write, atomic_write_json

    atomic_write_json(folder / RESULTS, document)
    atomic_write(folder / _MARKDOWN, sweep_pages.to_markdown(document))
    atomic_write(folder / _PAGE, sweep_pages.to_html(document, with_plots=with_plots))


def _text(document: dict[str, Any], out: Path) -> str:
    from omniw4.report import sweep_pages

    made = sweep_pages.table(document)
    return f"{table(made.header, made.rows)}\n\n{made.note}\n\nWrote {out}/sweep.html, sweep.md and sweep.json"
