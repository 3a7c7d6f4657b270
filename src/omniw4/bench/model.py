"""One whole forward, quantized against the original: prefill of a batch of sequences, no cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from omniw4.bench.result import ModelRow, OnProgress, Progress
from omniw4.bench.timing import REPETITIONS, WARMUP, Timing, measure, measure_eager
from omniw4.errors import UsageError
from omniw4.model import find_backbone

Prefill = tuple[int, int]  # batch, seq_len
CPU_PREFILL: tuple[Prefill, ...] = ((1, 32), (1, 256))
GPU_PREFILL: tuple[Prefill, ...] = ((2, 128), (2, 352), (2, 1024))


def parse_prefill(text: str) -> list[Prefill]:
    """``"1x128,2x352"`` (batch x tokens) to ``[(1, 128), (2, 352)]``; raises UsageError otherwise."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)[x×](\d+)\s*", part)
        if match is None or 0 in (batch := int(match[1]), tokens := int(match[2])):
            raise UsageError(
                f"--prefill wants BATCHxTOKENS, found {part.strip()!r}", hint="such as `--prefill 1x128,2x352`"
            )
        shapes.append((batch, tokens))
    return shapes


def bench_model(
    original: nn.Module,
    quantized: nn.Module,
    shapes: Sequence[Prefill],
    device: torch.device | str,
    *,
    path: str,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
    on_progress: OnProgress | None = None,
) -> list[ModelRow]:
    """Rows for every shape: called as they are, and on a GPU also captured in one CUDA graph."""
    device = torch.device(device)
    backbone = find_backbone(original)[0]  # in the quantized model the blocks hold no nn.Linear to find them by
    modes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    cases = [(shape, mode) for shape in shapes for mode in modes]
    rows = []
    for done, ((batch, seq_len), mode) in enumerate(cases, start=1):
        calls = [forward_call(model, backbone, batch, seq_len, device) for model in (quantized, original)]
        rows.append(_row(calls, batch, seq_len, mode, device, path, warmup, repetitions))
        if on_progress is not None:
            on_progress(Progress("model", done, len(cases), f"{batch}x{seq_len} {mode}"))
    return rows


def forward_call(
    model: nn.Module, backbone_path: str, batch: int, seq_len: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A call that runs the model on fixed random tokens, or its backbone on random embeddings where it has no head.

    Returns:
        A callable giving logits ``[B, L, V]`` or the last hidden state ``[B, L, H]``.
    """
    generator = torch.Generator().manual_seed(0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        ids = torch.randint(0, vocabulary, (batch, seq_len), generator=generator).to(device)
        return lambda: model(input_ids=ids, use_cache=False).logits
    backbone = model.get_submodule(backbone_path)
    parameter = next(backbone.parameters())
    width = int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
    embeddings = torch.randn(batch, seq_len, width, generator=generator).to(parameter)
    return lambda: backbone(inputs_embeds=embeddings, use_cache=False)[0]


def _row(
    calls: list[Callable[[], torch.Tensor]],
    batch: int,
    seq_len: int,
    mode: str,
    device: torch.device,
    path: str,
    warmup: int,
    repetitions: int,
) -> ModelRow:
    with torch.inference_mode():
        got, wanted = (call() for call in calls)
        checked = got.shape == wanted.shape and bool(torch.isfinite(got).all())
        if not checked:
            what = f"{tuple(got.shape)} against {tuple(wanted.shape)}" if got.shape != wanted.shape else "not finite"
            return ModelRow(batch, seq_len, mode, path, False, None, note=f"not timed: outputs are {what}")
        error = float((got.double() - wanted.double()).square().sum() / wanted.double().square().sum())
        del got, wanted
        timings: list[Timing | None] = []
        note = ""
        for name, call in zip(("quantized", "original"), calls, strict=True):
            try:
                timings.append(_time(call, mode, device, warmup, repetitions))
            except RuntimeError as e:  # a model that synchronises cannot be captured
                timings.append(None)
                note = f"the {name} model cannot be captured: {' '.join(str(e).split())[:120]}"
    return ModelRow(batch, seq_len, mode, path, True, error, timings[0], timings[1], note)


def _time(call: Callable[[], Any], mode: str, device: torch.device, warmup: int, repetitions: int) -> Timing:
    timer = measure if mode == "graph" or device.type != "cuda" else measure_eager
    return timer([call], device, warmup=warmup, repetitions=repetitions)
