"""On a GPU a step is a CUDA graph, which does what the same step without one does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from omniw4.config import Distill
from omniw4.distill import Example, Student, distill, trainer
from omniw4.tensors import LinearSpec
from tiny_models import MODELS, quantize_blocks

pytestmark = pytest.mark.gpu
SETTINGS = Distill(
    steps=6, warmup=2, batch_size=4, micro_batch=2, eval_every=3, save_every=100, patience=0, lr=0.02, seq_len=32
)


def run(*, graphs: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    model = MODELS["qwen3"]().to("cuda")
    ids = torch.randint(0, 300, (12, 32), generator=torch.Generator().manual_seed(1))
    examples = [Example({"input_ids": row[None], "use_cache": False}, torch.ones(32).bool()) for row in ids]
    captured = 0

    class Counted(trainer.GraphedLoss):
        def __init__(self, *arguments: object) -> None:
            nonlocal captured
            if not graphs:
                raise RuntimeError("no graphs here")
            super().__init__(*arguments)  # type: ignore[arg-type]
            captured += 1

    losses: list[float] = []
    # Activations in 16 bits: rounded to 4, a last bit of cuBLAS decides codes, and two runs part within a few steps.
    quantized = quantize_blocks(model, LinearSpec(act_bits=16))
    with patch.object(trainer, "GraphedLoss", Counted), Student(model, quantized) as student:
        distill(
            student, examples[4:], examples[:4], SETTINGS, device="cuda",
            on_progress=lambda progress: losses.append(progress.loss),
        )  # fmt: skip
        return losses, {name: p.detach().clone() for name, p in student.parameters().items()}, captured


def test_a_graph_does_what_the_step_does() -> None:
    losses, parameters, captured = run(graphs=True)
    wanted, wanted_parameters, none = run(graphs=False)
    assert (captured, none) == (2, 0)  # with gradients, and without for the held-out sequences
    assert losses == pytest.approx(wanted, rel=1e-2)
    assert losses[-1] < losses[0]
    change = sum(float((parameters[name] - p).square().sum()) for name, p in wanted_parameters.items())
    assert change < 0.05 * sum(float(p.square().sum()) for p in wanted_parameters.values())
