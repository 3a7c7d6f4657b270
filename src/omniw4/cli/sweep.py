"""``omniw4 sweep MODEL --recipe ... --out DIR``: quantize one model by several recipes and compare them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from omniw4 import config as configs
from omniw4.cli import options, quantize, settings
from omniw4.cli.output import Output, figure, table
from omniw4.errors import OmniW4Error, OutputExistsError, UsageError

_RESULTS, _MARKDOWN, _PAGE = "sweep.json", "sweep.md", "sweep.html"


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
    ],
    stats: Annotated[Path | None, typer.Option("--stats", metavar="DIR", help="What `omniw4 calibrate` wrote.")] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", metavar="TEXT", help="Held-out text; repeat for several. Else the built-in one."),
    ] = None,
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
    """Compare recipes on one model: perplexity, KL, agreement, bits and seconds, as a table and a plot."""
    chosen = [parse_recipe(text) for text in recipe]
    labels = [label for label, _, _ in chosen]
    if len(set(labels)) < len(labels):
        raise UsageError(f"two recipes are called {max(labels, key=labels.count)!r}", hint="give one a LABEL=")
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import model as models
    from omniw4.report import plots, sweep
    from omniw4.storage import OutputFolder, atomic_write, atomic_write_json

    options.check_device(device)
    if not no_plots:
        plots.require()
    texts: list[str | None] = [*dataset] if dataset else [None]
    fingerprint = {
        "verb": "sweep",
        "model": models.source_hash(model, gguf_file=gguf_file),
        "stats": _stats_of(stats),
        "datasets": [_named(text) for text in texts],
        "windows": windows,
        "seq_len": seq_len,
        "device": device.partition(":")[0],
        "dtype": dtype,
    }
    common: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "gguf_file": gguf_file,
        "trust_remote_code": trust_remote_code,
    }
    loaded = {label: settings.load(source, assignments) for label, source, assignments in chosen}
    models.check_positions(models.skeleton(model, gguf_file=gguf_file), seq_len)
    _check_stats(loaded, stats)
    known = _finished(out)
    others = {label for label, row in known.items() if row["fingerprint"] != fingerprint}
    if others and not overwrite:
        raise OutputExistsError(
            f"{str(out)!r} holds a comparison of another model, or on other texts, windows or statistics",
            hint="give --out another name, or replace it with --overwrite",
        )
    if (foreign := _foreign(out)) and not overwrite:
        raise OutputExistsError(
            f"{str(out / foreign[0])!r} is not of a comparison, and the folder is replaced as a whole",
            hint="give --out another name, move it away, or replace all of it with --overwrite",
        )
    with OutputFolder.begin(out, fingerprint, resume=True, overwrite=True, marker=_RESULTS) as folder:
        earlier = known | _finished(folder.partial)
        rows = [row for label, row in earlier.items() if label not in labels and row["fingerprint"] == fingerprint]
        for label, source, assignments in chosen:
            found = loaded[label]
            key = json.dumps(found.recipe.model_dump(mode="json"), sort_keys=True)
            kept = earlier.get(label)
            if kept is not None and kept["key"] == key and kept["fingerprint"] == fingerprint:
                output.note(f"{label}: measured before")
                rows.append(kept)
                continue
            checkpoint = folder.partial / "checkpoints" / label
            output.note(f"{label}: quantizing")
            began = time.monotonic()
            # its document is left out, ours has what matters of it
            with contextlib.redirect_stdout(io.StringIO()), _going_on_by_itself():
                quantize.command(
                    model=model,
                    out=checkpoint,
                    stats=stats if found.recipe.needs_stats else None,
                    config=source,
                    assignments=assignments,
                    distill_dataset=distill_dataset if found.recipe.distill.steps else None,
                    resume=True,
                    overwrite=True,
                    json_mode=True,
                    **common,
                )
            seconds = time.monotonic() - began
            rows.append(
                {
                    "label": label,
                    "key": key,
                    "fingerprint": fingerprint,
                    "activations": _activations(found),
                    "seconds": round(seconds, 1),
                    "distilled": found.recipe.distill.steps,
                    **_verdicts(checkpoint, model, texts, windows, seq_len, common, output, label),
                }
            )
            atomic_write_json(folder.partial / _RESULTS, {"recipes": rows})
            shutil.rmtree(checkpoint, ignore_errors=True)
        document = {
            "model": Path(model).name,
            "datasets": fingerprint["datasets"],
            "windows": windows,
            "seq_len": seq_len,
            "recipes": rows,
            "front": sweep.front(rows),
        }
        atomic_write_json(folder.result / _RESULTS, document)
        atomic_write(folder.result / _MARKDOWN, sweep.to_markdown(document))
        atomic_write(folder.result / _PAGE, sweep.to_html(document, with_plots=not no_plots))
        folder.commit()
    output.result(_text(document, out), document)


@contextlib.contextmanager
def _going_on_by_itself() -> Iterator[None]:
    """A comparison has no --resume, which `omniw4 quantize` names: it always goes on."""
    try:
        yield
    except OmniW4Error as e:
        e.hint = e.hint.replace("go on with --resume", "go on with the same command")
        raise


def _foreign(out: Path) -> list[str]:
    """What lies in a folder of results and is none."""
    if not (out / _RESULTS).is_file():
        return []  # OutputFolder refuses what no comparison made
    return sorted(entry.name for entry in out.iterdir() if entry.name not in (_RESULTS, _MARKDOWN, _PAGE))


def _check_stats(loaded: dict[str, configs.Config], stats: Path | None) -> None:
    """What would end the run at a later recipe, said before the first."""
    for label, found in loaded.items():
        if stats is None and found.recipe.needs_stats:
            raise UsageError(
                f"recipe {label!r} needs calibration statistics",
                hint="run `omniw4 calibrate MODEL --out DIR` and give `--stats DIR`, or compare data-free ones",
            )


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


def _verdicts(
    checkpoint: Path,
    model: str,
    texts: list[str | None],
    windows: int,
    seq_len: int,
    common: dict[str, Any],
    output: Output,
    label: str,
) -> dict[str, Any]:
    from omniw4.verify.run import run

    verify = configs.Verify(windows=windows, seq_len=seq_len)
    found = []
    for text in texts:
        result = run(checkpoint, model, dataset=text, settings=verify, layer_tokens=0, **common)
        for warning in result.warnings:
            output.warn(f"{label}: {warning}")
        document = result.to_dict()
        found.append({key: document[key] for key in ("perplexity", "kl", "argmax_agreement", "path")})
        ratio = figure(document["perplexity"]["ratio"], ".3f")
        output.note(f"{label}: ratio {ratio}, KL {figure(document['kl'], '.4f')} on {_named(text)}")
    return {"texts": found, "effective_bits": result.effective_bits}


def _activations(found: configs.Config) -> str:
    """``4``, or ``4+8`` where overrides give some linears another width."""
    widths = {found.recipe.activations.bits} | {o.act_bits for o in found.recipe.overrides if o.act_bits}
    return "+".join(str(bits) for bits in sorted(widths)) + " bits"


def _finished(folder: Path) -> dict[str, dict[str, Any]]:
    from omniw4.storage.files import read_note

    try:
        return {row["label"]: row for row in read_note(folder / _RESULTS)["recipes"]}
    except (KeyError, TypeError):
        return {}


def _stats_of(folder: Path | None) -> Any:
    if folder is None:
        return None
    from omniw4.calibrate import Stats

    return Stats.open(folder).fingerprint


def _named(text: str | None) -> str:
    from omniw4.calibrate.dataset import dataset_name

    return dataset_name(text)


def _text(document: dict[str, Any], out: Path) -> str:
    from omniw4.report import sweep

    made = sweep.table(document)
    return f"{table(made.header, made.rows)}\n\n{made.note}\n\nWrote {out}/sweep.html, sweep.md and sweep.json"
