"""The table of ops: every case checked, then timed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from omniw4.bench.cases import Case, Setting, linear_cases, rms_case, rope_case
from omniw4.bench.ceilings import roofline_share
from omniw4.bench.result import Ceiling, OnProgress, OpRow, Progress
from omniw4.bench.row_cases import row_cases
from omniw4.bench.timing import REPETITIONS, WARMUP, Timing, measure
from omniw4.errors import UsageError

Shape = tuple[int, int, int]  # M, N, K

BACKBONE = (
    (2048, 1024),
    (1024, 1024),
    (1024, 2048),
    (3072, 1024),
    (1024, 3072),
)  # OmniVoice's q, k/v, o, gate/up, down
CPU_TOKENS = (1, 64, 256)
GPU_TOKENS = (1, 16, 256, 704, 2048)
MAX_COPIES = 28  # distinct weights a case goes through on a GPU: the layers of the backbone


def parse_shapes(text: str) -> list[Shape]:
    """``"16x2048x1024,256x6144x1024"`` to ``[(16, 2048, 1024), (256, 6144, 1024)]``.

    Raises:
        UsageError: not of this form, a zero, or K not a multiple of 64.
    """
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)[x×](\d+)[x×](\d+)\s*", part)
        numbers = tuple(map(int, match.groups())) if match else ()
        if len(numbers) != 3 or 0 in numbers:
            raise UsageError(
                f"--shapes wants MxNxK, found {part.strip()!r}", hint="such as `--shapes 16x2048x1024,256x6144x1024`"
            )
        if numbers[2] % 64:
            near = max(64, round(numbers[2] / 64) * 64)
            raise UsageError(
                f"K must be a multiple of 64, found {numbers[2]} in {part.strip()!r}",
                hint=f"such as `--shapes {numbers[0]}x{numbers[1]}x{near}`; the order is MxNxK",
            )
        shapes.append(numbers)
    return shapes


def default_shapes(weights: Iterable[tuple[int, int]], on_gpu: bool) -> list[Shape]:
    """Every distinct ``(N, K)`` at small and large numbers of tokens."""
    tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
    return [(m, n, k) for n, k in dict.fromkeys(weights) for m in tokens]


def distinct_weights(device: torch.device, n: int, k: int) -> int:
    """Copies of a weight that flow through twice the L2 cache of a GPU, so that each comes from memory; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, max(2, math.ceil(2 * cache / (n * k // 2))))


def bench_ops(
    shapes: Sequence[Shape],
    setting: Setting,
    *,
    path: str,
    ceiling: Ceiling | None = None,
    warmup: int = WARMUP,
    repetitions: int = REPETITIONS,
    on_progress: OnProgress | None = None,
) -> list[OpRow]:
    """Rows of all ops at all shapes; those of rows once for each (M, K), ``qknorm_rope`` for each M."""
    rows: list[OpRow] = []
    widths: set[tuple[int, int]] = set()
    tokens: set[int] = set()
    for done, (m, n, k) in enumerate(shapes, start=1):
        baselines: dict[int, Timing] = {}
        cases = linear_cases(replace(setting, copies=distinct_weights(setting.device, n, k)), m, n, k)
        if (m, k) not in widths:
            widths.add((m, k))
            cases += [rms_case(setting, m, k), *row_cases(setting, m, k)]
        if m not in tokens:
            tokens.add(m)
            cases.append(rope_case(setting, m))
        rows += [_row(case, setting, path, ceiling, warmup, repetitions, baselines) for case in cases]
        if on_progress is not None:
            on_progress(Progress("ops", done, len(shapes), f"{m}x{n}x{k}"))
    return rows


def _row(
    case: Case,
    setting: Setting,
    path: str,
    ceiling: Ceiling | None,
    warmup: int,
    repetitions: int,
    baselines: dict[int, Timing],
) -> OpRow:
    with torch.inference_mode():
        error, tolerance = case.check()
        checked = error <= tolerance
        timing = baseline = None
        if checked:
            timing = measure(case.calls, setting.device, warmup=warmup, repetitions=repetitions)
            if case.baseline is not None:
                key = id(case.baseline)  # the cases of one shape share it: timed once
                if key not in baselines:
                    baselines[key] = measure(case.baseline, setting.device, warmup=warmup, repetitions=repetitions)
                baseline = baselines[key]
    return OpRow(
        case.op, case.m, case.n, case.k, setting.spec.rank, setting.spec.act_bits, case.ops, case.bytes, path,
        checked=checked, error=error, tolerance=tolerance, timing=timing, baseline=baseline,
        roofline=roofline_share(ceiling, case.ops, case.bytes, timing.median) if timing else None,
        note=case.note if checked else f"not timed: error {error:.2e} against FP64 is above {tolerance:.2e}",
    )  # fmt: skip
