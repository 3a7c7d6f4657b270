"""Which linears would gain most from 8-bit activations: measured one by one on the model's own outputs.

From the model with all linears as the checkpoint has them, one linear at a time gets INT8 activations, the rest
stays, and the fall of KL(original ‖ quantized) on held-out text is that linear's gain. Weights and codes are the
same at both widths, so nothing is quantized anew. Greedy choice by gain assumes that gains add up, which they nearly
do while few linears change; the caller measures the chosen set as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from omniw4.distill import Student
from omniw4.distill.loss import distance, outputs_of
from omniw4.tensors import QuantizedLinear
from omniw4.verify.evaluate import Item

OnLinear = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Gain:
    """What 8-bit activations of one linear are worth."""

    path: str
    loss: float  # of the whole model with this linear at 8 bits
    gain: float  # how much less that is than with all linears as they are
    weights: int  # N·K, what its matrix product costs

    @property
    def density(self) -> float:
        """Gain per weight: what a budget of time buys most of."""
        return self.gain / self.weights


@dataclass(frozen=True)
class Sensitivity:
    """Gains of all linears, the largest first; losses are KL in nats, or relative errors of hidden states."""

    kind: str  # "logits" or "hidden"
    baseline: float
    all_at_8: float
    gains: list[Gain]

    def choose(self, share: float, *, by: str = "count") -> list[str]:
        """Paths of the linears that get 8 bits: those with the largest gains, up to a share of all.

        Args:
            share: 0 to 1.
            by: ``"count"``: a share of the linears, by gain. ``"weights"``: a share of the weights (of the products'
                time), by gain per weight. A linear without a gain is never chosen.
        """
        useful = [gain for gain in self.gains if gain.gain > 0]
        if by == "count":
            return [gain.path for gain in useful[: int(share * len(self.gains) + 1e-9)]]
        left = share * sum(gain.weights for gain in self.gains)
        chosen = []
        for gain in sorted(useful, key=lambda g: g.density, reverse=True):
            if gain.weights <= left + 1e-6:
                chosen.append(gain.path)
                left -= gain.weights
        return chosen


def measure_sensitivity(
    model: nn.Module,
    linears: Mapping[str, QuantizedLinear],
    items: Sequence[Item],
    *,
    device: torch.device | str = "cpu",
    on_linear: OnLinear | None = None,
) -> Sensitivity:
    """Measure every linear that does not have 8-bit or unquantized activations already.

    Memory: the model, the codes of its linears in INT8, and the original's outputs on all items. Time: a forward over
    the items for each linear.

    Args:
        model: the original, on ``device``; as it was when the function returns.
        linears: of the checkpoint, by paths within ``model``.
        items: held-out sequences, such as :func:`omniw4.verify.evaluate.text_items`.
    """
    with Student(model, linears, train_scales=False) as student, torch.inference_mode():
        with student.teacher() as teacher:
            wanted = [outputs_of(teacher(**i.inputs_on(device)), i.keep[None].to(device)) for i in items]

        def loss() -> float:
            total = count = 0.0
            for item, (kind, outputs) in zip(items, wanted, strict=True):
                _, found = outputs_of(model(**item.inputs_on(device)), item.keep[None].to(device))
                total += float(distance(kind, outputs, found)) * outputs.shape[0]
                count += outputs.shape[0]
            return total / count

        baseline = loss()
        open_paths = [path for path, module in student.modules.items() if module.spec.act_bits == 4]
        gains = []
        for done, path in enumerate(open_paths, start=1):
            with student.modules[path].with_int8_activations():
                found = loss()
            gains.append(Gain(path, found, baseline - found, linears[path].out_features * linears[path].in_features))
            if on_linear is not None:
                on_linear(done, len(open_paths), path)
        with ExitStack() as stack:
            for path in open_paths:
                stack.enter_context(student.modules[path].with_int8_activations())
            all_at_8 = loss()
    gains.sort(key=lambda gain: (-gain.gain, gain.path))
    return Sensitivity(wanted[0][0], baseline, all_at_8, gains)
