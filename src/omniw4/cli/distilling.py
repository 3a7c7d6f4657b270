"""The distillation step of ``omniw4 quantize``: sequences in, trained layers and a record of it out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniw4.cli.output import Output, figure
from omniw4.errors import DatasetError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omniw4.calibrate.sources import HiddenSource
    from omniw4.checkpoint import LayerStore
    from omniw4.config import Distill
    from omniw4.distill import Example, Report
    from omniw4.model import LoadedModel
    from omniw4.storage import OutputFolder


class Text:
    """The text (or the captured hidden states) that distillation reads; opened before anything expensive happens.

    Args:
        dataset: as ``omniw4 calibrate`` takes it, or a ``.safetensors`` file of captured hidden states; None for the
            built-in text.

    Raises:
        DatasetError: nothing readable there.
    """

    def __init__(self, dataset: str | None) -> None:
        from omniw4.calibrate.dataset import dataset_name, laid_end_to_end, read_text, text_hash
        from omniw4.calibrate.sources import read_hidden

        self.name = dataset_name(dataset)
        self.hidden: HiddenSource | None = None
        self.documents: list[str] = []
        if dataset is not None and Path(dataset).suffix == ".safetensors":
            self.hidden = read_hidden(dataset)
            self.hash = self.hidden.fingerprint["source_sha256"]
        else:
            self.documents = read_text(dataset)
            self.hash = text_hash(laid_end_to_end(self.documents))
        self.windows: torch.Tensor | None = None  # [S, L] int64, of the text

    def measure(self, model: str, skeleton: nn.Module, tokenizer: Any, settings: Distill, bos: str) -> None:
        """Cut the text into sequences, and refuse what training would stumble over hours later.

        Args:
            model: its name, for messages. skeleton: the same without weights. tokenizer: its own, or None.

        Raises:
            DatasetError: too little for one sequence of each kind, text for a model without a tokenizer, or hidden
                states of another width than the model's.
            UsageError: sequences longer than the model has positions.
        """
        from omniw4.model import check_positions, find_backbone

        if self.hidden is None:
            check_positions(skeleton, settings.seq_len, "take shorter ones with `--set recipe.distill.seq_len={}`")
            self.windows = self._windows(model, tokenizer, settings, bos)
            found, length = len(self.windows), settings.seq_len
        else:
            length, width = self.hidden.hidden_states.shape[1:]
            check_positions(skeleton, length, "capture sequences of at most {} tokens")
            wanted = int(find_backbone(skeleton)[1].config.hidden_size)  # type: ignore[union-attr, arg-type]
            if width != wanted:
                raise DatasetError(
                    f"hidden states in {self.name!r} have {width} features, those of {model!r} have {wanted}",
                    hint="capture them from the model that is quantized",
                )
            found = int(self.hidden.mask.any(dim=1).sum())
        if found < 2:
            raise DatasetError(
                f"{self.name!r} fills {found} sequences of {length} tokens, distillation needs at least 2: one to"
                " train on and one to choose the best step by",
                hint="give a longer text with --distill-dataset, or shorter sequences with recipe.distill.seq_len",
            )

    def examples(self, loaded: LoadedModel, settings: Distill) -> tuple[str, list[Example], list[Example]]:
        """Path of the module that is trained ('' for the whole model), training and held-out sequences; measured
        before."""
        path, found = ("", self._rows()) if self.hidden is None else self._captured(loaded)
        held_out = min(settings.held_out, len(found) // 4 or 1)
        return path, found[held_out:][: settings.samples], found[:held_out]

    def _rows(self) -> list[Example]:
        from omniw4.distill import Example

        assert self.windows is not None, "measure() comes first"
        keep = self.windows.new_ones(self.windows.shape[1]).bool()
        return [Example({"input_ids": row[None], "use_cache": False}, keep) for row in self.windows]

    def _windows(self, model: str, tokenizer: Any, settings: Distill, bos: str) -> torch.Tensor:
        from omniw4.calibrate.dataset import tokenize

        if tokenizer is None:
            raise DatasetError(
                f"model {model!r} has no tokenizer, so text cannot be read into it",
                hint="give captured hidden states (.safetensors) with --distill-dataset",
            )
        wanted = settings.samples + settings.held_out
        try:
            tokens = tokenize(
                self.documents,
                tokenizer,
                wanted,
                settings.seq_len,
                settings.seed,
                bos,  # type: ignore[arg-type]
                name=self.name,
            )
        except DatasetError as e:
            raise DatasetError(e.message, hint="give a longer text with --distill-dataset") from e
        return tokens.tokens[tokens.mask.all(dim=1)]

    def _captured(self, loaded: LoadedModel) -> tuple[str, list[Example]]:
        from omniw4.distill import Example
        from omniw4.model import find_backbone

        path, backbone = find_backbone(loaded.model)
        found = []
        for index in range(len(self.hidden or ())):
            batch = self.hidden.batch(index, index + 1, backbone)  # type: ignore[union-attr]
            if bool(batch.mask.any()):
                found.append(Example({**batch.inputs, "use_cache": False}, batch.mask[0]))
        return path, found


def distil(
    loaded: LoadedModel,
    store: LayerStore,
    settings: Distill,
    text: Text,
    folder: OutputFolder,
    device: str,
    output: Output,
) -> tuple[LayerStore, dict[str, Any]]:
    """Train the layers of ``store`` against the original model.

    Returns:
        A store with the trained layers, and the record for the checkpoint: what was trained on which text, the
        losses, never a time.

    Raises:
        NonFiniteError, ResumeError, StorageError: see :func:`omniw4.distill.distill`.
    """
    from omniw4.checkpoint import LayerStore
    from omniw4.distill import Progress, Student, distill

    root, training, selection = text.examples(loaded, settings)
    prefix = f"{root}." if root else ""
    outside = [path for path in store.done() if not path.startswith(prefix)]
    target = loaded.model.get_submodule(root).to(device)
    linears = {path.removeprefix(prefix): store.linear(path) for path in sorted(store.done() - set(outside))}
    output.note(
        f"distilling {len(linears)} linears on {text.name!r}: {len(training)} sequences to train on,"
        f" {len(selection)} held out to choose the best step"
    )
    if device == "cpu":
        output.note("on a CPU an update takes seconds to minutes; the time left is shown, and --resume goes on")
    with Student(target, linears, train_scales=settings.scales) as student, output.progress("distilling") as bar:

        def tell(progress: Progress) -> None:
            measured = "" if progress.held_out is None else f"  held-out {progress.held_out:.4f}"
            bar.step(progress.step, progress.steps, f"loss {progress.loss:.4f}{measured}")

        report = distill(student, training, selection, settings, device=device, folder=folder.partial, on_progress=tell)
        trained = LayerStore(folder.partial / "distilled")
        for path in sorted(store.done()):
            module = student.modules.get(path.removeprefix(prefix)) if path not in outside else None
            trained.put(path, module.quantized() if module else store.linear(path), store.report(path))
    loaded.model.to("cpu")
    output.note(_told(report))
    record = {k: v for k, v in asdict(report).items() if k != "seconds"}
    data = {
        "dataset": text.name,
        "source_sha256" if text.hidden is not None else "text_sha256": text.hash,
        "training_sequences": len(training),
        "held_out_sequences": len(selection),
    }
    return trained, {"data": data, "report": record}


def _told(report: Report) -> str:
    what = "KL" if report.kind == "logits" else "relative error of the hidden states"
    ended = "stopped early, " if report.stopped_early else ""
    share = f" ({1 - report.held_out_best / report.held_out_before:.0%} less)" if report.held_out_before else ""
    return (
        f"distilled {report.parameters:,} parameters for {report.steps} steps: {ended}held-out {what}"
        f" {figure(report.held_out_before, '.4f')} before, {figure(report.held_out_best, '.4f')} at step"
        f" {report.best_step}{share}\n"
    )
