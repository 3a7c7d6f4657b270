"""The whole benchmark: what is asked for, in one environment, as one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from omniw4 import model as models
from omniw4 import ops
from omniw4.bench.backbone import ALL, TOKENS, bench_backbone
from omniw4.bench.cases import Setting
from omniw4.bench.ceilings import measure_ceiling
from omniw4.bench.contest import TOKENS as CONTEST_TOKENS
from omniw4.bench.contest import contest, quantizer_rows
from omniw4.bench.environment import environment
from omniw4.bench.linear import BACKBONE, Shape, bench_ops, default_shapes
from omniw4.bench.model import CPU_PREFILL, GPU_PREFILL, Prefill, bench_model
from omniw4.bench.omnivoice import ENGINES as OMNIVOICE_ENGINES
from omniw4.bench.omnivoice import PACKAGE, REQUESTS, bench_omnivoice
from omniw4.bench.omnivoice_rows import OmniVoiceRow
from omniw4.bench.process import bench_quantize
from omniw4.bench.result import BenchResult, OnProgress, Progress
from omniw4.bench.timing import REPETITIONS, WARMUP
from omniw4.checkpoint.origin import require_origin
from omniw4.checkpoint.reader import Checkpoint
from omniw4.errors import UsageError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.load import load
from omniw4.tensors import LinearSpec

WHAT = ("ops", "model", "quantize", "backbone", "omnivoice", "linear")
CPU_REPETITIONS, CPU_WARMUP = 5, 1
_ON_CPU = "on a CPU: the references in plain torch are timed, not kernels; these numbers say nothing about a GPU"
_RANDOM = "omnivoice: random weights of the real size, 32 steps; RTF is generate() from text and reference to waveform"
_TINY = "omnivoice on a CPU: two requests, 4 steps, 2 layers, to see that it runs; not a figure of anything"
_EMULATED = "mma_s4 is emulated on this GPU (native on sm_80, sm_86, sm_89): its times prove nothing about its speed"


def run(
    directory: str | Path | None = None,
    model: str | Path | None = None,
    *,
    what: Sequence[str] = ("ops",),
    shapes: Sequence[Shape] | None = None,
    prefill: Sequence[Prefill] | None = None,
    spec: LinearSpec | None = None,
    layout: str | None = None,
    engines: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    warmup: int | None = None,
    repetitions: int | None = None,
    calibrate_flags: Sequence[str] = (),
    quantize_flags: Sequence[str] = (),
    workdir: Path | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress | None = None,
) -> BenchResult:
    """Time what is asked for; arguments and result are described in :mod:`omniw4.bench`.

    Raises:
        UsageError: an unknown part, or a part without the folder or model it needs.
        CheckpointError, ModelError: a folder or model that cannot be read, or a model the checkpoint was not made from.
    """
    _check(what, directory, model)
    # a model that is not there, or not the checkpoint's, is told before anything is timed
    model_hash = None if model is None else models.source_hash(model, gguf_file=gguf_file)
    target = torch.device(device)
    on_gpu = target.type == "cuda"
    warmup = (WARMUP if on_gpu else CPU_WARMUP) if warmup is None else warmup
    repetitions = (REPETITIONS if on_gpu else CPU_REPETITIONS) if repetitions is None else repetitions
    checkpoint = Checkpoint.open(directory) if directory is not None else None
    if checkpoint is not None and model_hash is not None:
        require_origin(checkpoint, str(model), model_hash)
    spec = spec or _common_spec(checkpoint)
    asked_layout = layout
    layout = layout or ops.kernel_layout(target, spec.act_bits, spec.scale_type)
    path = "reference" if layout == ops.CANONICAL else layout
    run_dtype = models.DTYPES[_dtype(dtype, on_gpu)]
    result = BenchResult(
        environment(target, warmup=warmup, repetitions=repetitions), str(run_dtype).removeprefix("torch."), path
    )
    result.hash = checkpoint.hash if checkpoint is not None else None
    if not on_gpu and set(what) & {"ops", "model", "backbone"}:
        result.notes.append(_ON_CPU)
    if path == "mma_s4" and on_gpu and torch.cuda.get_device_capability(target) >= (9, 0):
        result.notes.append(_EMULATED)
    if "ops" in what:
        result.ceiling = measure_ceiling(target)
        if result.ceiling is not None and on_progress is not None:
            on_progress(Progress("ceilings", 1, 1, result.ceiling.source))
        weights = [(s.out_features, s.in_features) for s in checkpoint.linears.values()] if checkpoint else BACKBONE
        wanted = list(shapes) if shapes else default_shapes(weights, on_gpu)
        result.ops = bench_ops(
            wanted, Setting(target, run_dtype, spec, layout), path=path, ceiling=result.ceiling,
            warmup=warmup, repetitions=repetitions, on_progress=on_progress,
        )  # fmt: skip
    if "model" in what and directory is not None and model is not None:
        loaded = models.load(
            model, dtype=result.dtype, device=device, gguf_file=gguf_file, trust_remote_code=trust_remote_code
        )
        quantized = load(directory, device, result.dtype, trust_remote_code=trust_remote_code)
        layouts = {m.layout for m in quantized.modules() if isinstance(m, W4A4Linear)}
        ran = "+".join(sorted("reference" if name == ops.CANONICAL else name for name in layouts))
        result.model = bench_model(
            loaded.model, quantized, list(prefill or (GPU_PREFILL if on_gpu else CPU_PREFILL)), target,
            path=ran, warmup=warmup, repetitions=repetitions, on_progress=on_progress,
        )  # fmt: skip
    if "quantize" in what and model is not None:
        extra = ["--gguf-file", gguf_file] if gguf_file else []
        result.quantize = bench_quantize(
            str(model), calibrate=[*extra, *calibrate_flags], quantize=[*extra, *quantize_flags],
            workdir=workdir, on_progress=on_progress,
        )  # fmt: skip
    if "backbone" in what:
        result.backbone = bench_backbone(
            target, run_dtype, engines=engines or ALL, tokens=tokens or TOKENS, layout=asked_layout,
            warmup=warmup, repetitions=repetitions, on_progress=on_progress,
        )  # fmt: skip
    if "linear" in what:
        result.ceiling = result.ceiling or measure_ceiling(target)
        result.linear = contest(
            target, dtype=run_dtype, ceiling=result.ceiling, tokens=tokens or CONTEST_TOKENS, warmup=warmup,
            repetitions=repetitions, on_progress=on_progress,
        )  # fmt: skip
        result.quantizer = quantizer_rows(target, warmup, repetitions)
    if "omnivoice" in what:
        named = None if "backbone" in what else engines  # whose engines have other names
        result.omnivoice = _bench_omnivoice(target, named, repetitions, on_progress)
        result.notes.append(_RANDOM if on_gpu else _TINY)
    return result


def _bench_omnivoice(
    device: torch.device, engines: Sequence[str] | None, repetitions: int, on_progress: OnProgress | None
) -> list[OmniVoiceRow]:
    repetitions = min(repetitions, 3)  # of calls that take a second each
    if device.type == "cuda":
        return bench_omnivoice(
            device, engines=engines or OMNIVOICE_ENGINES, repetitions=repetitions, on_progress=on_progress
        )
    return bench_omnivoice(
        device, engines=engines or (PACKAGE, "reference"), requests=REQUESTS[:2], repetitions=repetitions, num_step=4,
        tiny=True, on_progress=on_progress,
    )  # fmt: skip


def _check(what: Sequence[str], directory: str | Path | None, model: str | Path | None) -> None:
    for part in what:
        if part not in WHAT:
            raise UsageError(f"cannot bench {part!r}", hint=f"--what takes {', '.join(WHAT)}")
    if "model" in what and directory is None:
        raise UsageError(
            "timing a whole model needs a checkpoint", hint="name its folder: `omniw4 bench DIR --model MODEL`"
        )
    if set(what) & {"model", "quantize"} and model is None:
        raise UsageError("timing a whole model or its quantization needs the original", hint="name it with `--model`")


def _common_spec(checkpoint: Checkpoint | None) -> LinearSpec:
    """The spec that most linears of the checkpoint have; the default without one."""
    specs = list(checkpoint.specs.values()) if checkpoint else []
    return replace(max(specs, key=specs.count), smooth=False) if specs else LinearSpec()


def _dtype(dtype: str, on_gpu: bool) -> str:
    if dtype == "auto":
        return "float16" if on_gpu else "float32"
    if dtype not in models.DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(models.DTYPES)}")
    return dtype
