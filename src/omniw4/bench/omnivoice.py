"""Real-time factor of the real package omnivoice: unpatched against ``accelerate``, in one process.

Ten requests, each with 4 s of reference audio, one at a time and in batches. The model has the real size and random
weights: what they are does not change how long a step takes, and no step depends on what was decoded before. RTF is
the time of ``generate()`` over the seconds of audio it returns, from text and reference waveform to waveform, so that
tokenizing, the codec and copies are in it.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from omniw4 import int4
from omniw4 import model as models
from omniw4.bench.omnivoice_rows import OmniVoiceRow, Sample
from omniw4.bench.result import OnProgress, Progress
from omniw4.errors import UsageError
from omniw4.hadamard import hadamard64
from omniw4.model.omnivoice import BACKBONE, TINY, import_omnivoice, random_omnivoice
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.omnivoice import Accelerated, accelerate, restore
from omniw4.runtime.swap import replace
from omniw4.tensors import LinearSpec, QuantizedLinear

PACKAGE = "package"
ENGINES = (PACKAGE, "fp16", "fp8", "w4a4", "w4a8")
BATCHES = (1, 8)
REFERENCE_SECONDS, REFERENCE_TEXT = 4.0, "This is the voice that all of the requests are to be read in."


@dataclass(frozen=True)
class Request:
    name: str
    text: str
    seconds: float
    language: str = "en"


REQUESTS = (
    Request("short", "Good morning, how are you today?", 2.5),
    Request("weather", "Tomorrow will be cloudy, with a little rain in the afternoon.", 3.5),
    Request("train", "The train to the coast leaves from platform seven in twenty minutes.", 4.5),
    Request("recipe", "Stir the flour into the warm milk, a spoonful at a time, until nothing sticks to the pan.", 5.5),
    Request("vi", "Hôm nay trời đẹp, chúng ta cùng đi dạo quanh hồ rồi uống một tách cà phê nhé.", 6.5, "vi"),
    Request("de", "Im Garten hinter dem Haus stehen drei alte Apfelbäume, unter denen wir im Sommer essen.", 7.5, "de"),
    Request("fr", "Le marché ouvre à huit heures, mais les meilleurs fruits sont déjà vendus à neuf.", 8.5, "fr"),
    Request("guide", "On your left you can see the old harbour, where ships from all over the world were once "
            "unloaded by hand, sack by sack.", 9.5),
    Request("manual", "Before you change the filter, switch the machine off, wait until it has cooled down, and open "
            "the cover on its back with the key.", 10.8),
    Request("story", "Nobody in the village could remember who had planted the lime tree, but everybody agreed that it "
            "had always been there, even before the church and the well.", 12.0),
)  # fmt: skip


def bench_omnivoice(
    device: torch.device | str,
    *,
    engines: Sequence[str] = ENGINES,
    batches: Sequence[int] = BATCHES,
    requests: Sequence[Request] = REQUESTS,
    repetitions: int = 3,
    num_step: int = 32,
    tiny: bool = False,
    on_progress: OnProgress | None = None,
) -> list[OmniVoiceRow]:
    """Rows for every engine and batch size, the package's first.

    Args:
        engines: of :data:`ENGINES`; those that do not run on the device become a row without samples and a note.
        batches: how many requests a call; batches larger than 1 take the first requests of the table.
        repetitions: timed calls of each sample, after one that does not count.
        tiny: a model of 2 layers and a codec of few channels, for a CPU.

    Raises:
        ModelError: the package omnivoice cannot be imported.
        UsageError: an unknown engine.
    """
    unknown = [name for name in engines if name not in (*ENGINES, "bf16", "reference")]
    if unknown:
        raise UsageError(f"no engine {unknown[0]!r} of OmniVoice", hint=f"there are {', '.join(ENGINES)}")
    import_omnivoice()
    device = torch.device(device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = random_omnivoice(TINY if tiny else BACKBONE, tiny_codec=tiny, dtype=dtype, device=device)
    call = _Call(model, num_step)
    rows: list[OmniVoiceRow] = []
    for done, engine in enumerate(engines, start=1):
        try:
            _add_rows(rows, call, model, engine, batches, requests, repetitions)
        except UsageError as e:
            rows += [OmniVoiceRow(engine, batch, [], note=e.message) for batch in batches]
        gc.collect()  # so that the next engine's memory is its own
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if on_progress is not None:
            on_progress(Progress("omnivoice", done, len(engines), engine))
    return rows


def _add_rows(
    rows: list[OmniVoiceRow],
    call: _Call,
    model: Any,
    engine: str,
    batches: Sequence[int],
    requests: Sequence[Request],
    repetitions: int,
) -> None:
    with _running(model, engine) as (host, report):
        for batch in batches:
            rows.append(_row(call, host, engine, batch, requests, repetitions, report, rows))


class _Call:
    """``generate`` on some requests, with the time that decoding took."""

    def __init__(self, model: Any, num_step: int) -> None:
        rate = model.sampling_rate
        noise = torch.randn(1, int(REFERENCE_SECONDS * rate), generator=torch.Generator().manual_seed(0)) * 0.1
        self.reference, self.num_step = (noise, rate), num_step
        self.device = model.device

    def __call__(self, host: Any, requests: Sequence[Request]) -> tuple[float, float, list[torch.Tensor]]:
        """Seconds in all, seconds of decoding, waveforms."""
        spent: list[float] = []
        with _timed(host, spent, self._wait):
            self._wait()
            start = time.perf_counter()
            waves = host.generate(
                text=[r.text for r in requests],
                language=[r.language for r in requests],
                duration=[r.seconds for r in requests],
                ref_audio=[self.reference] * len(requests),
                ref_text=[REFERENCE_TEXT] * len(requests),
                num_step=self.num_step,
                postprocess_output=False,
            )
            self._wait()
            seconds = time.perf_counter() - start
        return seconds, sum(spent), [torch.as_tensor(wave) for wave in waves]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _timed(host: Any, spent: list[float], wait: Callable[[], None]) -> Iterator[None]:
    """Note the seconds that the host's decoding takes."""
    before = host.__dict__.get("_generate_iterative")
    decode = host._generate_iterative

    def timed(*args: Any) -> Any:
        wait()
        start = time.perf_counter()
        result = decode(*args)
        wait()
        spent.append(time.perf_counter() - start)
        return result

    host.__dict__["_generate_iterative"] = timed
    try:
        yield
    finally:
        if before is None:
            del host.__dict__["_generate_iterative"]
        else:
            host.__dict__["_generate_iterative"] = before


@contextmanager
def _running(model: Any, engine: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The model as an engine runs it, and what starting it took; undone afterwards."""
    if engine == PACKAGE:
        yield model, {}
        return
    host = model
    if engine in ("w4a4", "w4a8"):
        host = with_random_quantized(model, LinearSpec(act_bits=8 if engine == "w4a8" else 4, scale_type="integer"))
    try:
        accelerated: Accelerated = accelerate(host, backend=engine)
        yield host, accelerated.report()
    finally:
        restore(host)


def _row(
    call: _Call,
    host: Any,
    engine: str,
    batch: int,
    requests: Sequence[Request],
    repetitions: int,
    report: dict[str, Any],
    rows: Sequence[OmniVoiceRow],
) -> OmniVoiceRow:
    groups = [[request] for request in requests] if batch == 1 else [list(requests[:batch])]
    on_gpu = call.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(call.device)
    samples, checked = [], True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        call(host, groups[-1])
        for group in groups:
            runs = [call(host, group) for _ in range(repetitions)]
            seconds = [request.seconds for request in group]
            checked = checked and all(_sound(waves, seconds, host.sampling_rate) for *_, waves in runs)
            name = group[0].name if batch == 1 else f"batch of {len(group)}"
            samples.append(Sample(name, sum(seconds), tuple(r[0] for r in runs), tuple(r[1] for r in runs)))
    row = OmniVoiceRow(engine, batch, samples, num_step=call.num_step, checked=checked, start_up=report)
    row.memory_bytes = torch.cuda.max_memory_allocated(call.device) if on_gpu else None
    row.note = next(
        (str(w.message) for w in caught if "omniw4" in str(w.message) or "uncaptured" in str(w.message)), ""
    )
    package = next((r for r in (*rows, row) if r.engine == PACKAGE and r.batch == batch and r.samples), None)
    if package is not None and package.mean_rtf and row.mean_rtf:
        row.speedup = package.mean_rtf / row.mean_rtf
    return row


def _sound(waves: Sequence[torch.Tensor], seconds: Sequence[float], rate: int) -> bool:
    """Finite, and as long as asked for: a frame is 1/25 s, and silence may be added at the ends."""
    fits = [len(wave) >= (want - 1 / 25) * rate for wave, want in zip(waves, seconds, strict=True)]
    return all(fits) and all(bool(wave.isfinite().all()) for wave in waves)


def with_random_quantized(model: Any, spec: LinearSpec) -> Any:
    """A model that shares everything with ``model`` but the linears of its blocks, which are rounded to nearest.

    The low-rank branch has random entries: it costs what a fitted one costs.
    """
    linears = models.block_linears(model)
    quantized: dict[str, torch.nn.Module] = {
        path: W4A4Linear(round_to_nearest(linear.weight.detach(), spec)) for path, linear in linears.items()
    }
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo)
    replace(twin, quantized, kept={})
    return twin


def round_to_nearest(weight: torch.Tensor, spec: LinearSpec) -> QuantizedLinear:
    """``[N, K]`` float, data-free; see :func:`with_random_quantized`."""
    rotated = hadamard64(weight.float()) if spec.rotation == "hadamard64" else weight.float()
    row_scales = None
    if spec.scale_type == "integer":
        codes, scales, outer = int4.quantize_groups_integer(rotated)
        row_scales = outer[:, 0].contiguous()
    else:
        codes, scales = int4.quantize_groups(rotated)
    n, k = weight.shape
    down = up = None
    if spec.rank:
        down = torch.randn(k, spec.rank, device=weight.device).mul_(k**-0.5 * 0.01).half()
        up = torch.randn(n, spec.rank, device=weight.device).half()
    return QuantizedLinear(spec, int4.pack_nibbles(codes), scales, down, up, row_scales=row_scales)
