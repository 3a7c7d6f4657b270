"""``omniw4 profile [MODEL|DIR]``: where the time of a step goes, engines side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4.cli import options
from omniw4.cli.output import figure, table
from omniw4.errors import UsageError

if TYPE_CHECKING:
    from omniw4.profile import Engine, EngineProfile, ProfileResult

_MARKER = "profile.json"
_TRACES = "trace-*.json.gz"
_KEYS = frozenset({"environment", "engines"})
_WHAT = ("backbone", "omnivoice")


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|DIR]", help="Original model, or a checkpoint; without it OmniVoice's backbone, random."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Checkpoint of MODEL, for quantized engines.")
    ] = None,
    what: Annotated[
        str, typer.Option("--what", metavar="PART", help="backbone: a forward; omnivoice: a whole generate().")
    ] = "backbone",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME,...",
            help="hf, swapped, reference, fp16, bf16, fp8, w4a4, w4a8; of omnivoice: package and the latter.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="M", min=1, help="Tokens of a forward.")] = 704,
    sequences: Annotated[int, typer.Option("--sequences", metavar="N", min=1, help="Sequences they make up.")] = 2,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens attend to earlier ones only.")] = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Traced steps.")] = 3,
    repetitions: Annotated[
        int, typer.Option("--repetitions", metavar="N", min=1, help="Timed steps, without the profiler.")
    ] = 10,
    tiny: Annotated[bool, typer.Option("--tiny", help="Without MODEL: a backbone of two layers, for a CPU.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the traces and profile.json.")] = Path(
        "profile"
    ),
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Trace some steps and explain their time: kinds of kernels, idle share, launches, the longest gaps."""
    if what not in _WHAT:
        raise UsageError(f"cannot profile {what!r}", hint=f"--what takes {' or '.join(_WHAT)}")
    names = [name.strip() for text in engine or [] for name in text.split(",") if name.strip()]
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import model as models
    from omniw4 import storage
    from omniw4.bench.environment import environment
    from omniw4.checkpoint import Checkpoint, require_origin
    from omniw4.profile import run
    from omniw4.profile.engines import is_checkpoint

    options.check_device(device)
    if model is not None and is_checkpoint(model):
        if checkpoint is not None:
            raise UsageError(f"{model!r} is a checkpoint, and --checkpoint names another", hint="drop one of them")
        checkpoint, model = Path(model), None
    if tiny and (model is not None or checkpoint is not None):
        raise UsageError("--tiny is for a random backbone", hint="leave MODEL and --checkpoint out, or drop --tiny")
    if model is not None and checkpoint is not None:
        require_origin(Checkpoint.open(checkpoint), model, models.source_hash(model, gguf_file=gguf_file))
    files = storage.OwnFiles(_MARKER, (_TRACES,), _KEYS)
    files.check(out)
    load = _Models(model, checkpoint, what, device, _dtype(dtype, device), tiny, gguf_file, trust_remote_code)
    engines = load.engines(names or _default(what, load, device), tokens, sequences, causal)
    about = environment(device, warmup=3, repetitions=repetitions)
    with tempfile.TemporaryDirectory(prefix="omniw4-profile-") as scratch, output.progress("profiling") as bar:
        result = run(
            engines,
            what=what,
            device=device,
            tokens=tokens,
            sequences=sequences,
            steps=steps,
            repetitions=repetitions,
            environment=about.to_dict(),
            out=Path(scratch),
            on_progress=bar.step,
        )
        result.hash = Checkpoint.open(checkpoint).hash if checkpoint is not None else None
        traces = {file.name: file for file in sorted(Path(scratch).glob(_TRACES))}
        files.put(out, {_MARKER: storage.json_text(result.to_dict()), **traces})
    output.result("\n".join([about.line(), report(result, out)]), result.to_dict())


class _Models:
    """The models that engines ask for, each loaded when the first engine needs it."""

    def __init__(
        self,
        model: str | None,
        checkpoint: Path | None,
        what: str,
        device: str,
        dtype: str,
        tiny: bool,
        gguf_file: str | None,
        trust_remote_code: bool,
    ) -> None:
        self.model, self.checkpoint, self.what, self.device, self.dtype = model, checkpoint, what, device, dtype
        self.tiny, self.gguf_file, self.trust_remote_code = tiny, gguf_file, trust_remote_code

    @property
    def is_random(self) -> bool:
        return self.model is None and self.checkpoint is None

    def engines(self, names: list[str], tokens: int, sequences: int, causal: bool) -> list[Engine]:
        from omniw4 import profile

        original = self._original()
        if self.what == "omnivoice":
            if original is None:
                raise UsageError("--what omnivoice needs the original model", hint="name it before --checkpoint DIR")
            return profile.omnivoice(names, original, self._quantized(original))
        return profile.backbone(
            names,
            original,
            self._quantized(original),
            tokens=tokens,
            sequences=sequences,
            causal=causal,
            device=self.device,
        )

    def _original(self) -> Any:
        import torch

        from omniw4 import model as models
        from omniw4.profile.engines import random_backbone

        dtype = models.DTYPES[self.dtype]
        if self.is_random and self.what == "omnivoice":
            from omniw4.model.omnivoice import BACKBONE, TINY, random_omnivoice

            sizes = TINY if self.tiny else BACKBONE
            return random_omnivoice(sizes, tiny_codec=self.tiny, dtype=dtype, device=torch.device(self.device))
        if self.is_random:
            return random_backbone(tiny=self.tiny, dtype=dtype, device=self.device)
        if self.model is None:
            return None
        if self.what == "omnivoice":
            return self._package_model(dtype)
        return models.load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            gguf_file=self.gguf_file,
            trust_remote_code=self.trust_remote_code,
        ).model

    def _package_model(self, dtype: Any) -> Any:
        """An OmniVoice with its codec, as the package itself loads it."""
        from omniw4.model.files import as_model_error, find_source
        from omniw4.model.omnivoice import import_omnivoice

        files = find_source(self.model or "", self.gguf_file)
        package = import_omnivoice()
        with as_model_error(f"cannot load {files.name!r} as an OmniVoice"):
            return package.OmniVoice.from_pretrained(files.folder, dtype=dtype, device_map=self.device).eval()

    def _quantized(self, original: Any) -> Callable[[], Any] | None:
        if (folder := self.checkpoint) is not None:
            from omniw4.runtime.load import load

            return lambda: load(folder, self.device, self.dtype, trust_remote_code=self.trust_remote_code)
        if not self.is_random:
            return None
        from omniw4.bench.omnivoice import with_random_quantized
        from omniw4.tensors import LinearSpec

        return lambda: with_random_quantized(original, LinearSpec(scale_type="integer"))


def _dtype(dtype: str, device: str) -> str:
    from omniw4 import model as models

    if dtype == "auto":
        return "float16" if device.startswith("cuda") else "float32"
    models.check_dtype(dtype)
    return dtype


def _default(what: str, load: _Models, device: str) -> list[str]:
    """Before and after: the original as it is, and the engine that fits what is there."""
    on_gpu = device.startswith("cuda")
    quantized = load.checkpoint is not None or (load.is_random and on_gpu)
    after = ("w4a4" if quantized else "fp16") if on_gpu else "reference"
    if what == "omnivoice":
        return ["package", after]
    if load.model is None and not load.is_random:
        return ["swapped", after]
    return ["hf", after]


def report(result: ProfileResult, out: Path) -> str:
    """Engines side by side, then each with its longest kernels and gaps."""
    parts = ["\n".join(f"note: {note}" for note in result.notes)] if result.notes else []
    parts += [_side_by_side(result), _kinds(result)]
    for engine in result.engines:
        parts += [_kernels(engine), _gaps(engine)]
    traces = ", ".join(str(out / engine.trace) for engine in result.engines if engine.trace)
    parts.append(f"Wrote {traces}; open them at https://ui.perfetto.dev")
    return "\n\n".join(part for part in parts if part)


def _side_by_side(result: ProfileResult) -> str:
    header = (
        "engine",
        "ms a step",
        "± σ",
        "busy ms",
        "idle",
        "kernels",
        "launches",
        "µs a launch",
        "launching ms",
        "×",
    )
    rows = [
        (
            *(e.name, f"{e.step_ms:.3f}", f"{e.step_std_ms:.3f}", f"{e.busy_ms:.3f}", f"{e.idle_share:.1%}"),
            *(f"{e.kernels:.0f}", f"{e.launches:.0f}", figure(e.launch_us, ".1f"), figure(e.launch_ms, ".3f")),
            figure(result.speedup(i), ".2f"),
        )
        for i, e in enumerate(result.engines)
    ]
    return table(header, rows)


def _kinds(result: ProfileResult) -> str:
    kinds = list(dict.fromkeys(row.kind for engine in result.engines for row in engine.breakdown))
    columns = ("ms", "share", "calls", "mean µs")
    header = ("kind", *(f"{engine.name} {column}" for engine in result.engines for column in columns))
    rows = []
    for kind in kinds:
        cells: list[str] = []
        for engine in result.engines:
            row = next((r for r in engine.breakdown if r.kind == kind), None)
            if row is None:
                cells += ["-"] * len(columns)
            else:
                cells += [f"{row.ms:.3f}", f"{row.share:.1%}", f"{row.count:.0f}", f"{row.mean_us:.1f}"]
        rows.append((kind, *cells))
    return table(header, rows)


def _kernels(engine: EngineProfile) -> str:
    rows = [(row.name[:72], row.kind, f"{row.ms:.3f}", f"{row.count:.0f}", f"{row.mean_us:.1f}") for row in engine.top]
    return table((f"{engine.name}: longest kernels", "kind", "ms", "calls", "mean µs"), rows, left=2)


def _gaps(engine: EngineProfile) -> str:
    if not engine.gaps:
        return ""
    rows = [
        (f"{gap.us:.0f}", gap.after[:36], gap.before[:36], " < ".join(gap.python[:3])[:120] or "-")
        for gap in engine.gaps
    ]
    return table((f"{engine.name}: longest gaps, µs", "after", "before", "Python, innermost first"), rows, left=4)
