"""The runs of a comparison: read back from earlier ones, and measured, each one recipe from one calibration."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniw4 import config as configs
from omniw4.cli import quantize
from omniw4.cli.output import Output, figure
from omniw4.errors import OmniW4Error, UsageError
from omniw4.storage.files import read_note

RESULTS = "sweep.json"
_SHOWN_CHANGES = 3
_ONE_ROW = configs.Verify(windows=1, seq_len=4096)  # of hidden states, beside prompts: those are judged by decoding

Run = dict[str, Any]  # of sweep.json: label, key, fingerprint, figures


@dataclass(frozen=True)
class Candidate:
    """A recipe of the command line."""

    label: str
    source: str
    assignments: list[str]
    recipe: configs.Recipe

    @property
    def key(self) -> str:
        """The whole recipe: runs of equal keys may stand in for each other."""
        return _key(self.recipe)

    @property
    def activations(self) -> str:
        """``4 bits``, or ``4+8 bits`` where overrides give some linears another width."""
        widths = {self.recipe.activations.bits} | {o.act_bits for o in self.recipe.overrides if o.act_bits}
        return "+".join(str(bits) for bits in sorted(widths)) + " bits"

    def named(self, stats: Path | None) -> str:
        """A run of it, for a person."""
        return self.label if stats is None else f"{self.label} from {stats.name}"


@dataclass(frozen=True)
class Judge:
    """What every run is judged on, and how models are opened."""

    model: str
    texts: Sequence[str | None]  # empty with prompts
    windows: int
    seq_len: int
    prompts: Path | None
    num_step: int
    distill_dataset: str | None
    opening: dict[str, Any]  # device, dtype, gguf_file, trust_remote_code

    def measure(self, candidate: Candidate, stats: Path | None, checkpoint: Path, output: Output) -> Run:
        """Quantize into a folder, judge what came out, and remove it: the figures of a run."""
        name = candidate.named(stats)
        output.note(f"{name}: quantizing")
        began = time.monotonic()
        # its document is left out, ours has what matters of it
        with contextlib.redirect_stdout(io.StringIO()), _going_on_by_itself():
            quantize.command(
                model=self.model,
                out=checkpoint,
                stats=stats,
                config=candidate.source,
                assignments=candidate.assignments,
                distill_dataset=self.distill_dataset if candidate.recipe.distill.steps else None,
                resume=True,
                overwrite=True,
                json_mode=True,
                **self.opening,
            )
        seconds = round(time.monotonic() - began, 1)
        figures = self._verdicts(checkpoint, output, name)
        speed = _speed(checkpoint, self.opening["device"], output, name)
        shutil.rmtree(checkpoint, ignore_errors=True)
        return {
            "activations": candidate.activations,
            "seconds": seconds,
            "distilled": candidate.recipe.distill.steps,
            "backbone_ms": speed,
            **figures,
        }

    def _verdicts(self, checkpoint: Path, output: Output, name: str) -> dict[str, Any]:
        from omniw4.verify.run import run

        settings = configs.Verify(windows=self.windows, seq_len=self.seq_len) if self.prompts is None else _ONE_ROW
        found = []
        for text in self.texts or [None]:
            result = run(
                checkpoint, self.model, dataset=text, prompts=self.prompts, num_step=self.num_step, settings=settings,
                layer_tokens=0, **self.opening,
            )  # fmt: skip
            for warning in result.warnings:
                output.warn(f"{name}: {warning}")
            document = result.to_dict()
            figures = {key: document[key] for key in ("perplexity", "kl", "argmax_agreement", "path")}
            if document["decoding"]:
                figures["match"] = document["decoding"]["match"]
                told = f"step agreement {figure(figures['argmax_agreement'], '.2%')}"
            else:
                told = f"ratio {figure(figures['perplexity']['ratio'], '.3f')}"
            found.append(figures)
            output.note(f"{name}: {told}, KL {figure(figures['kl'], '.4f')} on {self.name_of(text)}")
        return {"texts": found, "effective_bits": result.effective_bits}

    def name_of(self, text: str | None) -> str:
        from omniw4.calibrate.dataset import dataset_name

        return dataset_name(text) if self.prompts is None else self.prompts.name


@contextlib.contextmanager
def _going_on_by_itself() -> Iterator[None]:
    """A comparison has no --resume, which `omniw4 quantize` names: it always goes on."""
    try:
        yield
    except OmniW4Error as e:
        e.hint = e.hint.replace("go on with --resume", "go on with the same command")
        raise


def _speed(checkpoint: Path, device: str, output: Output, name: str) -> float | None:
    """Milliseconds of a forward on the fused engine; None, and a note on a GPU, where it does not run this."""
    from omniw4.bench import speed

    try:
        return speed.backbone_milliseconds(checkpoint, device)
    except OmniW4Error as e:
        output.note(f"{name}: no speed, the engine does not run it: {e.message}")
        return None


def identity(run: Run) -> tuple[str, str]:
    """What there is one run of: a label, and the calibration's fingerprint."""
    return run["label"], json.dumps(run["fingerprint"]["stats"], sort_keys=True)


def comparison(run: Run) -> dict[str, Any]:
    """What all runs of a table have in common: model, texts, windows, device, dtype."""
    return {key: value for key, value in run["fingerprint"].items() if key != "stats"}


def digest(candidate: Candidate, calibration: Any) -> str:
    """Name of the folder that a run is made in: what a killed run left is gone on with by the same one alone."""
    return hashlib.sha256(json.dumps([candidate.key, calibration], sort_keys=True).encode()).hexdigest()[:16]


def finished(folder: Path) -> list[Run]:
    """The runs of a folder's results, in the order of its table; none where it holds none that can be read."""
    try:
        rows = read_note(folder / RESULTS)["recipes"]
        # where there was one calibration alone, a row was a run
        runs = [_as_of_now(run) for row in rows for run in row.get("runs", [row])]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return union([], runs)


def union(earlier: Iterable[Run], later: Iterable[Run]) -> list[Run]:
    """All runs, one of an identity: the later; a label means the later's recipe alone."""
    later = list(later)
    keys = {run["label"]: run["key"] for run in later}
    kept = {identity(run): run for run in earlier if keys.get(run["label"], run["key"]) == run["key"]}
    return list((kept | {identity(run): run for run in later}).values())


def merged(runs: list[Run], folder: Path, wanted: dict[str, Any], keys: dict[str, str]) -> list[Run]:
    """The runs with those of another comparison's folder.

    Args:
        wanted: :func:`comparison` of this one.
        keys: label -> recipe, of the command line.

    Raises:
        UsageError: no comparison, one of another model or other texts, or another recipe by the same name.
    """
    found = finished(folder)
    if not found:
        raise UsageError(
            f"--merge {str(folder)!r} holds no readable {RESULTS}", hint="give the --out of an earlier `omniw4 sweep`"
        )
    keys = {run["label"]: run["key"] for run in runs} | keys
    for run in found:
        if changes := configs.difference(comparison(run), wanted):
            raise UsageError(
                f"--merge {str(folder)!r} is of another comparison than this one: {_some(changes)}",
                hint="give the model, texts, windows, device and dtype of the comparison that is merged",
            )
        key = keys.get(run["label"])
        if key is not None and key != run["key"]:
            changes = configs.difference(json.loads(run["key"]), json.loads(key))
            raise UsageError(
                f"--merge {str(folder)!r} has another recipe {run['label']!r} than this comparison: {_some(changes)}",
                hint="give the one of this comparison another LABEL=",
            )
    return union(runs, found)


def _as_of_now(run: Run) -> Run:
    """A run as it would be written now: keys added to recipes since at their defaults, no calibration where none
    was needed."""
    try:
        recipe = configs.Recipe.model_validate(json.loads(run["key"]))
    except ValueError:
        return run  # a recipe of another version: equal to none of this
    calibration = run["fingerprint"]["stats"] if recipe.needs_stats else None
    return {**run, "key": _key(recipe), "fingerprint": {**run["fingerprint"], "stats": calibration}}


def _key(recipe: configs.Recipe) -> str:
    return json.dumps(recipe.model_dump(mode="json"), sort_keys=True)


def _some(changes: list[str]) -> str:
    return "; ".join(changes[:_SHOWN_CHANGES]) + ("; ..." if len(changes) > _SHOWN_CHANGES else "")
