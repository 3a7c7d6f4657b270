"""The loop: it improves held-out outputs, keeps the best state, and goes on where it stopped with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omniw4.config import Distill
from omniw4.distill import Example, Progress, Student, distill
from omniw4.distill.loss import kl, relative_error
from omniw4.distill.state import FILE
from omniw4.distill.trainer import _epoch_order, cosine
from omniw4.errors import NonFiniteError, ResumeError
from omniw4.tensors import LinearSpec
from tiny_models import MODELS, quantize_blocks

SETTINGS = Distill(
    steps=12, warmup=2, batch_size=2, micro_batch=2, eval_every=4, save_every=4, patience=0, lr=0.02, seq_len=24
)


def examples(count: int, seed: int) -> list[Example]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (count, 24), generator=g)
    return [Example({"input_ids": row[None], "use_cache": False}, torch.ones(24, dtype=torch.bool)) for row in ids]


def run(
    settings: Distill = SETTINGS, *, sequences: int = 6, stop_after: int = 0, headless: bool = False, **options: Any
):
    torch.manual_seed(0)
    model = MODELS["qwen3"]()
    quantized = quantize_blocks(model, LinearSpec(rank=8))
    target = model.model if headless else model
    names = {path.removeprefix("model.") if headless else path: linear for path, linear in quantized.items()}
    seen: list[Progress] = []

    def tell(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == stop_after:
            raise KeyboardInterrupt

    with Student(target, names) as student:
        report = distill(student, examples(sequences, 1), examples(3, 2), settings, on_progress=tell, **options)
        return report, {path: m.quantized() for path, m in student.modules.items()}, seen


@pytest.mark.parametrize("headless", [False, True])
def test_training_brings_held_out_outputs_nearer(headless: bool) -> None:
    settings = SETTINGS.model_copy(update={"steps": 120, "batch_size": 4, "micro_batch": 4, "eval_every": 40})
    report, linears, seen = run(settings, sequences=480, headless=headless)
    assert report.kind == ("hidden" if headless else "logits")
    assert report.held_out_best < 0.95 * report.held_out_before
    assert report.best_step > 0
    assert [p.step for p in seen] == list(range(1, 121))
    assert [e["step"] for e in report.log] == [0, 40, 80, 120]
    assert len(linears) == 14


def test_a_run_that_was_cut_off_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    _, whole, _ = run()
    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, stop_after=6)
    report, resumed, seen = run(folder=tmp_path)
    assert [p.step for p in seen] == list(range(5, 13))
    assert [e["step"] for e in report.log] == [0, 4, 8, 12]
    for path, linear in whole.items():
        for name, tensor in linear.tensors().items():
            assert torch.equal(resumed[path].tensors()[name], tensor), f"{path}.{name}"


def test_the_best_state_is_kept_not_the_last() -> None:
    wild = SETTINGS.model_copy(update={"lr": 3.0, "max_grad_norm": 1e9})
    report, linears, _ = run(wild)
    assert report.best_step == 0
    assert report.held_out_best == report.held_out_before
    torch.manual_seed(0)
    for path, linear in quantize_blocks(MODELS["qwen3"](), LinearSpec(rank=8)).items():
        for name, tensor in linear.tensors().items():
            assert torch.equal(linears[path].tensors()[name], tensor), f"{path}.{name}"


def test_it_stops_when_nothing_is_gained() -> None:
    settings = SETTINGS.model_copy(update={"lr": 3.0, "steps": 40, "patience": 2, "eval_every": 2})
    report, _, _ = run(settings)
    assert report.stopped_early
    assert report.steps == 4


def test_checkpointing_changes_nothing() -> None:
    plain, with_it = run()[1], run(SETTINGS.model_copy(update={"checkpointing": True}))[1]
    for path, linear in plain.items():
        assert torch.equal(linear.proj_up, with_it[path].proj_up), path


def test_micro_batches_change_only_the_rounding() -> None:
    one, two = run(SETTINGS.model_copy(update={"micro_batch": 1}))[0], run()[0]
    assert one.held_out_best == pytest.approx(two.held_out_best, rel=1e-2)


def test_a_damaged_or_foreign_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, stop_after=6)
    state = tmp_path / FILE
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResumeError, match="damaged"):
        run(folder=tmp_path)
    state.write_bytes(whole)
    with pytest.raises(ResumeError, match="other linears"):
        run(SETTINGS, folder=tmp_path, headless=True)


def test_a_loss_that_is_not_finite_is_named() -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]()
    quantized = quantize_blocks(model, LinearSpec(rank=8))
    with Student(model, quantized) as student:
        next(iter(student.modules.values())).codes.fill_(3)
        next(iter(student.parameters().values())).data.fill_(float("nan"))
        with pytest.raises(NonFiniteError, match="at step 0"):
            distill(student, examples(2, 1), examples(2, 2), SETTINGS)


def test_kl_and_relative_error_against_their_definitions() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(700, 11, generator=g), torch.randn(700, 11, generator=g)
    wanted = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean()
    assert float(kl(p, q)) == pytest.approx(float(wanted), rel=1e-5)
    assert float(kl(p, p)) == pytest.approx(0, abs=1e-6)
    error = F.mse_loss(q, p, reduction="none").sum(-1) / p.square().sum(-1)
    assert float(relative_error(p, q)) == pytest.approx(float(error.mean()), rel=1e-5)


def test_the_order_of_sequences_is_a_function_of_the_step() -> None:
    row = _epoch_order(5, 0, 15, 7)
    assert [sorted(row[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert row[3:9] == _epoch_order(5, 3, 6, 7)
    assert row != _epoch_order(5, 0, 15, 8)


def test_the_learning_rate() -> None:
    rates = [cosine(step, 100, 10) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0)
