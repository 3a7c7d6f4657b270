"""The loop: AdamW on the student's parameters against the teacher, and the best state on held-out sequences kept.

A linear's low-rank factors and its scales differ in size by orders of magnitude, so each tensor's learning rate is
relative to its root mean square at the start; a scale's is relative by itself. The text for training, for selection
and for evaluation must be three different ones: this module sees the first two.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.config import Distill
from omniw4.distill import state as states
from omniw4.distill.graph import GraphedLoss
from omniw4.distill.loss import distance, outputs_of
from omniw4.distill.student import Student
from omniw4.errors import NonFiniteError

BETAS = (0.9, 0.95)
EPSILON = 1e-8
_MIN_RMS = 1e-6  # of a factor that is all zero

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One sequence: keyword arguments of the forward, tensors with a leading 1, and ``[L]`` bool of what counts."""

    inputs: dict[str, Any]
    keep: torch.Tensor


@dataclass(frozen=True)
class Progress:
    """What is known after each step; ``held_out`` only where it was measured."""

    step: int
    steps: int
    loss: float
    held_out: float | None
    seconds_left: float


@dataclass
class Report:
    """What distillation did, stored in the checkpoint; losses are KL in nats, or relative errors of hidden states."""

    kind: str  # "logits" or "hidden"
    steps: int
    best_step: int
    held_out_before: float
    held_out_best: float
    stopped_early: bool
    parameters: int
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def distill(
    student: Student,
    training: Sequence[Example],
    selection: Sequence[Example],
    settings: Distill,
    *,
    device: torch.device | str = "cpu",
    folder: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Train a student in place and leave it in its best state.

    Runs under BF16 autocast on a GPU, there as a CUDA graph where every position of every sequence counts and nothing
    is recomputed, and in FP32 on a CPU. The same inputs give the same parameters on the same
    machine, also when the run was cut off and resumed from ``folder``.

    Args:
        student: entered, on ``device``.
        training, selection: sequences; those of equal shapes share a forward.
        settings: the recipe's ``distill`` section.
        folder: where the state is kept every ``save_every`` steps; None keeps none.

    Raises:
        NonFiniteError: the loss became NaN or inf.
        ResumeError: the state in ``folder`` is damaged or of another model.
        StorageError: it cannot be written.
    """
    run = _Run(student, training, selection, settings, torch.device(device), folder)
    return run.train(on_progress)


class _Run:
    def __init__(
        self,
        student: Student,
        training: Sequence[Example],
        selection: Sequence[Example],
        settings: Distill,
        device: torch.device,
        folder: str | Path | None,
    ) -> None:
        self.student, self.training, self.selection = student, training, selection
        self.settings, self.device, self.folder = settings, device, folder
        self.parameters = student.parameters()
        self.rates = {name: _relative_rate(name, p) for name, p in self.parameters.items()}
        groups = [{"params": [p], "lr": settings.lr * self.rates[name]} for name, p in self.parameters.items()]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, weight_decay=0.0)
        self.log: list[dict[str, Any]] = []
        self.best: dict[str, torch.Tensor] = {}
        self.best_step = 0
        self.kind = ""
        self.graphs: dict[Any, GraphedLoss | None] = {}  # by what was captured; None: it could not be

    def train(self, on_progress: Callable[[Progress], None] | None) -> Report:
        began, steps = time.monotonic(), self.settings.steps
        first = self._restore()
        if first == 0:
            self._keep_best(0, self._held_out(), None)
        step = first
        while step < steps and not self._stalled():
            loss = self._step(step)
            step += 1
            held_out = None
            if step % self.settings.eval_every == 0 or step == steps:
                held_out = self._held_out()
                self._keep_best(step, held_out, loss)
            if self.folder is not None and (step % self.settings.save_every == 0 or step == steps):
                self._save(step)
            if on_progress is not None:
                left = (time.monotonic() - began) / (step - first) * (steps - step)
                on_progress(Progress(step, steps, loss, held_out, left))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.best[name])
        return Report(
            kind=self.kind or self._find_kind(),
            steps=step,
            best_step=self.best_step,
            held_out_before=self.log[0]["held_out"],
            held_out_best=min(entry["held_out"] for entry in self.log),
            stopped_early=step < steps,
            parameters=sum(p.numel() for p in self.parameters.values()),
            log=self.log,
            seconds=time.monotonic() - began,
        )

    def _step(self, step: int) -> float:
        """One update; returns the training loss."""
        size = self.settings.batch_size
        order = _epoch_order(len(self.training), step * size, size, self.settings.seed)
        batch = [self.training[i] for i in order]
        rate = cosine(step, self.settings.steps, self.settings.warmup)
        for group, relative in zip(self.optimizer.param_groups, self.rates.values(), strict=True):
            group["lr"] = self.settings.lr * relative * rate
        self.optimizer.zero_grad(set_to_none=False)  # graphs add to the tensors that are there
        total = 0.0
        for stacked, share in _stack(batch, self.settings.micro_batch):
            total += float(self._gradients(stacked, share)) * share
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the distillation loss became {total} at step {step}",
                hint="lower recipe.distill.lr, or leave distillation out with --distill-steps 0",
            )
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        self.optimizer.step()
        return total

    def _gradients(self, example: Example, share: float) -> torch.Tensor:
        """Add ``share`` times the gradients of the loss; returns the loss."""
        graph = self._graph(example, share)
        if graph is not None:
            return graph(example)
        loss = self._loss(example)
        (loss * share).backward()
        return loss.detach()

    def _graph(self, example: Example, share: float | None) -> GraphedLoss | None:
        """The graph of a loss, without gradients for ``share`` None; None where it cannot be captured."""
        if self.device.type != "cuda" or self.settings.checkpointing or not bool(example.keep.all()):
            return None
        key = (share, tuple(sorted((name, str(shape)) for name, shape in _shapes(example).items())))
        if key not in self.graphs:
            parameters = [] if share is None else list(self.parameters.values())
            try:
                self.graphs[key] = GraphedLoss(self._loss, example, parameters, share or 0.0)
            except RuntimeError as e:  # a model that waits for the GPU in its forward
                log.warning("distilling without a CUDA graph, several times slower: %s", str(e).splitlines()[0])
                self.graphs[key] = None
        return self.graphs[key]

    def _loss(self, example: Example) -> torch.Tensor:
        inputs = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
        keep = None if bool(example.keep.all()) else example.keep.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            with self.student.teacher() as teacher:
                self.kind, wanted = outputs_of(teacher(**inputs), keep)
            with _checkpointing(self.student.model, self.settings.checkpointing and torch.is_grad_enabled()):
                _, found = outputs_of(self.student.model(**inputs), keep)
        return distance(self.kind, wanted, found)

    @torch.no_grad()
    def _held_out(self) -> float:
        """Mean loss over the selection sequences."""
        total = 0.0
        for stacked, share in _stack(list(self.selection), self.settings.micro_batch):
            total += float((self._graph(stacked, None) or self._loss)(stacked)) * share
        return total

    def _find_kind(self) -> str:
        self._held_out()
        return self.kind

    def _keep_best(self, step: int, held_out: float, loss: float | None) -> None:
        self.log.append({"step": step, "loss": loss, "held_out": held_out})
        if not self.best or held_out <= min(entry["held_out"] for entry in self.log):
            self.best = {name: p.detach().clone() for name, p in self.parameters.items()}
            self.best_step = step

    def _stalled(self) -> bool:
        """Whether the last ``patience`` evaluations brought nothing."""
        since = sum(entry["step"] > self.best_step for entry in self.log)
        return 0 < self.settings.patience <= since

    def _save(self, step: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            tensors[f"now.{name}"] = parameter.detach()
            tensors[f"best.{name}"] = self.best[name]
            tensors[f"mean.{name}"] = moments["exp_avg"]
            tensors[f"square.{name}"] = moments["exp_avg_sq"]
        states.write(self.folder or "", states.State(step, self.best_step, self.log, tensors))

    @torch.no_grad()
    def _restore(self) -> int:
        """Take up the state of an interrupted run; returns the steps it had made."""
        found = None if self.folder is None else states.read(self.folder, self.parameters)
        if found is None:
            return 0
        self.log, self.best_step = found.log, found.best_step
        for name, parameter in self.parameters.items():
            parameter.copy_(found.tensors[f"now.{name}"])
            self.best[name] = found.tensors[f"best.{name}"].to(parameter.device)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(found.step)),
                "exp_avg": found.tensors[f"mean.{name}"].to(parameter.device),
                "exp_avg_sq": found.tensors[f"square.{name}"].to(parameter.device),
            }
        return found.step


@contextmanager
def _checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """Recompute activations in the backward pass, which transformers does only in a model that is training."""
    names = ("activation", "gradient")  # the method's name in transformers from 5.20 on, and before
    name = next((n for n in names if hasattr(model, f"{n}_checkpointing_enable")), None) if on else None
    if name is None:
        yield
        return
    was_training = model.training
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        getattr(model, f"{name}_checkpointing_disable")()


def cosine(step: int, steps: int, warmup: int) -> float:
    """Share of the learning rate at a step: linear over ``warmup`` steps, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _relative_rate(name: str, parameter: nn.Parameter) -> float:
    if name.endswith(".scale_shift"):
        return 1.0
    return max(float(parameter.detach().square().mean().sqrt()), _MIN_RMS)


def _epoch_order(count: int, start: int, size: int, seed: int) -> list[int]:
    """``size`` indices from position ``start`` of an endless row of shuffled epochs: a function of its arguments."""
    chosen = []
    for position in range(start, start + size):
        epoch, place = divmod(position, count)
        generator = torch.Generator().manual_seed(seed + epoch)
        chosen.append(int(torch.randperm(count, generator=generator)[place]))
    return chosen


def _stack(examples: Sequence[Example], size: int) -> list[tuple[Example, float]]:
    """Up to ``size`` neighbours of equal shapes in one example, each with its share of all counted positions."""
    total = sum(int(e.keep.sum()) for e in examples)
    stacked: list[list[Example]] = []
    for example in examples:
        if stacked and len(stacked[-1]) < size and _shapes(stacked[-1][0]) == _shapes(example):
            stacked[-1].append(example)
        else:
            stacked.append([example])
    joined = []
    for group in stacked:
        first = group[0].inputs
        inputs = {
            k: torch.cat([e.inputs[k] for e in group]) if isinstance(v, torch.Tensor) else v for k, v in first.items()
        }
        keep = torch.stack([e.keep for e in group])
        joined.append((Example(inputs, keep), int(keep.sum()) / total))
    return joined


def _shapes(example: Example) -> dict[str, Any]:
    return {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
