"""Perplexity, KL divergence and argmax agreement of one model against another, sequence by sequence.

The outputs of one sequence are held at a time, those of both models, and log-softmax runs in FP32 over a slice of
positions; sums are kept in FP64. Position ``t`` of a text window predicts token ``t + 1``: the last position has no
label and is counted in none of the figures, so that all of them are means over the same tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from omniw4.errors import ModelError
from omniw4.verify.result import OnProgress, Progress

SLICE = 128  # rows of logits whose FP32 log-probabilities exist at a time


@dataclass
class Item:
    """One sequence, alone in its batch.

    Args:
        inputs: keyword arguments of the forward, tensors with a leading 1.
        keep: ``[L]`` bool, the positions that count.
        labels: ``[keep.sum()]`` int64, the token each of them predicts; None where nothing is predicted.
    """

    inputs: dict[str, Any]
    keep: torch.Tensor
    labels: torch.Tensor | None = None

    def inputs_on(self, device: torch.device | str) -> dict[str, Any]:
        """The keyword arguments with their tensors moved."""
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()}


@dataclass
class Outputs:
    """What a model said about the counted positions of one sequence."""

    hidden: torch.Tensor | None = None  # [T, H]
    logits: torch.Tensor | None = None  # [T, V], or [T·C, V] for C heads


@dataclass
class Forward:
    """A model as the evaluation sees it.

    Args:
        model: called with the keyword arguments of a sequence.
        heads: applied to the last hidden state of a model that has no logits of its own; ``[.., H] -> [.., C·V]``.
        codebooks: C.
    """

    model: Callable[..., Any]
    heads: Callable[[torch.Tensor], torch.Tensor] | None = None
    codebooks: int = 1

    def __call__(self, sequence: Item, device: torch.device | str) -> Outputs:
        output = self.model(**sequence.inputs_on(device))
        keep = sequence.keep.to(device)
        logits, hidden = getattr(output, "logits", None), getattr(output, "last_hidden_state", None)
        hidden = None if hidden is None else hidden[0][keep]
        if logits is not None:
            return Outputs(hidden, logits[0][keep])
        if hidden is None:
            raise ModelError(f"{type(self.model).__name__} returned neither logits nor a last hidden state")
        if self.heads is None:
            return Outputs(hidden)
        return Outputs(hidden, self.heads(hidden).reshape(hidden.shape[0] * self.codebooks, -1))


@dataclass
class Comparison:
    """Sums over the counted positions of all sequences; figures that were never counted are None."""

    tokens: int = 0
    rows: int = 0  # rows of logits: tokens times heads
    labelled: int = 0
    nll_reference: float = 0.0
    nll_quantized: float = 0.0
    kl_sum: float = 0.0
    agreements: int = 0
    hidden_error_sum: float = 0.0
    hidden_norm_sum: float = 0.0
    finite: bool = True
    seconds: dict[str, float] = field(default_factory=lambda: {"reference": 0.0, "quantized": 0.0})

    @property
    def perplexity_reference(self) -> float | None:
        return _exp(self.nll_reference / self.labelled) if self.labelled else None

    @property
    def perplexity_quantized(self) -> float | None:
        return _exp(self.nll_quantized / self.labelled) if self.labelled else None

    @property
    def ratio(self) -> float | None:
        return _exp((self.nll_quantized - self.nll_reference) / self.labelled) if self.labelled else None

    @property
    def kl(self) -> float | None:
        """Mean over rows of KL(reference ‖ quantized) in nats."""
        return self.kl_sum / self.rows if self.rows else None

    @property
    def argmax_agreement(self) -> float | None:
        return self.agreements / self.rows if self.rows else None

    @property
    def hidden_error(self) -> float | None:
        """``‖ĥ - h‖² / ‖h‖²`` of the last hidden states."""
        return self.hidden_error_sum / self.hidden_norm_sum if self.hidden_norm_sum else None

    def add(self, reference: Outputs, quantized: Outputs, labels: torch.Tensor | None) -> None:
        """Count one sequence.

        Raises:
            ModelError: the two models' outputs differ in kind or shape.
        """
        if _shapes(reference) != _shapes(quantized):
            raise ModelError(
                f"the original gives {_shapes(reference)}, the quantized model {_shapes(quantized)}",
                hint="give the model the checkpoint was made from with --model",
            )
        if reference.hidden is not None and quantized.hidden is not None:
            h = reference.hidden.double()
            self.hidden_error_sum += float((quantized.hidden.double() - h).square().sum())
            self.hidden_norm_sum += float(h.square().sum())
            self.finite = self.finite and bool(torch.isfinite(h).all() and torch.isfinite(quantized.hidden).all())
            self.tokens += h.shape[0]
        elif reference.logits is not None:
            self.tokens += reference.logits.shape[0]
        if reference.logits is not None and quantized.logits is not None:
            self._add_logits(reference.logits, quantized.logits, labels)

    def _add_logits(self, p_logits: torch.Tensor, q_logits: torch.Tensor, labels: torch.Tensor | None) -> None:
        for start in range(0, p_logits.shape[0], SLICE):
            part = slice(start, start + SLICE)
            p = F.log_softmax(p_logits[part].float(), dim=-1)  # [t, V]
            q = F.log_softmax(q_logits[part].float(), dim=-1)
            self.kl_sum += float((p.exp() * (p - q)).sum(-1).double().sum())
            self.agreements += int((p_logits[part].argmax(-1) == q_logits[part].argmax(-1)).sum())
            self.finite = self.finite and bool(torch.isfinite(p).all() and torch.isfinite(q).all())
            if labels is not None:
                index = labels[part, None].to(p.device)
                self.nll_reference -= float(p.gather(-1, index).double().sum())
                self.nll_quantized -= float(q.gather(-1, index).double().sum())
                self.labelled += p.shape[0]
        self.rows += p_logits.shape[0]


def compare(
    reference: Forward,
    quantized: Forward,
    sequences: Sequence[Item],
    *,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Run both models over the sequences, one sequence a forward."""
    total = Comparison()
    started = time.perf_counter()
    with torch.inference_mode():
        for done, sequence in enumerate(sequences, start=1):
            p = _timed(reference, sequence, device, total.seconds, "reference")
            q = _timed(quantized, sequence, device, total.seconds, "quantized")
            total.add(p, q, sequence.labels)
            if on_progress is not None:
                eta = (time.perf_counter() - started) / done * (len(sequences) - done)
                on_progress(Progress("evaluate", done, len(sequences), f"window {done}", eta))
    return total


def text_items(windows: torch.Tensor, *, labelled: bool = True) -> list[Item]:
    """Windows of text ``[S, L]`` int64 without padding as sequences: shifted labels, the last position not counted.

    Args:
        labelled: False for a model whose heads do not predict the next token.
    """
    keep = torch.ones(windows.shape[1], dtype=torch.bool)
    keep[-1] = False
    return [Item({"input_ids": ids[None], "use_cache": False}, keep, ids[1:] if labelled else None) for ids in windows]


def _timed(
    forward: Forward, sequence: Item, device: torch.device | str, seconds: dict[str, float], name: str
) -> Outputs:
    start = time.perf_counter()
    outputs = forward(sequence, device)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    seconds[name] += time.perf_counter() - start
    return outputs


def _shapes(outputs: Outputs) -> dict[str, tuple[int, ...]]:
    named = {"hidden": outputs.hidden, "logits": outputs.logits}
    return {name: tuple(tensor.shape) for name, tensor in named.items() if tensor is not None}


def _exp(x: float) -> float:
    return math.exp(x) if not x >= 700 else math.inf
