"""The resumable walk over layers.

It knows no files: weights come from callables, statistics from a function, results go to a function. Linears that
read the same input are quantized together or not at all, so a run that was stopped between two of them and
resumed gives the same bytes as one that was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch

from omniw4.config import Recipe
from omniw4.errors import ModelError, NonFiniteError, StatsError
from omniw4.quantize.layer import Linear, quantize_groups
from omniw4.quantize.plan import Plan, PlanEntry, skip_flags
from omniw4.tensors import LayerReport, LinearStats, QuantizedLinear

WeightSource = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
GPU_BATCH_BYTES = 6 * 2**30
SIDE_BY_SIDE_BYTES = 2**29  # working memory up to which a CPU quantizes several inputs at once
SIDE_BY_SIDE = 4  # of them at most: beyond, they wait for the interpreter

Item = TypeVar("Item")
Made = TypeVar("Made")
Save = Callable[[str, QuantizedLinear, LayerReport], None]


@dataclass(frozen=True)
class Progress:
    """What is known after each linear."""

    done: int  # linears finished, those of an earlier run included
    total: int
    report: LayerReport


def check_finite(weights: Mapping[str, WeightSource], plan: Plan) -> None:
    """Look at every weight and bias before the first is quantized: damage is told at once, all of it in one message.

    Raises:
        NonFiniteError: naming the linears that hold NaN or inf, and how many.
    """
    bad: dict[str, int] = {}
    for entry in plan.quantized:
        for tensor in weights[entry.path]():
            if tensor is not None and (count := int((~torch.isfinite(tensor)).sum())):
                bad[entry.path] = bad.get(entry.path, 0) + count
    if bad:
        shown = ", ".join(f"{path} ({count} values)" for path, count in list(bad.items())[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NonFiniteError(
            f"the weights of {len(bad)} linear{'s' * (len(bad) > 1)} hold NaN or inf: {shown}{more}",
            hint=f"repair the model, or leave them as they are with {skip_flags(list(bad), weights)}",
        )


def quantize_model(
    weights: Mapping[str, WeightSource],
    plan: Plan,
    recipe: Recipe,
    stats_for: Callable[[str], LinearStats | None],
    save: Save,
    done: Collection[str] = frozenset(),
    on_progress: Callable[[Progress], None] | None = None,
    *,
    group_of: Callable[[str], str] | None = None,
    device: torch.device | str = "cpu",
    part: tuple[int, int] = (0, 1),
) -> list[LayerReport]:
    """Quantize every linear of the plan that is not done.

    Memory: one group of linears that share an input, and its statistics; several where they are small and there are
    cores (:func:`side_by_side`); on a GPU a batch of equal groups (:meth:`Plan.peak_bytes`).

    Args:
        weights: path to a callable that loads ``(weight [N, K], bias [N] or None)`` when its turn comes.
        plan: from :func:`omniw4.quantize.plan.make_plan`.
        stats_for: statistics of a linear's input, or None when there are none.
        save: called once for each linear, in the plan's order of batches, with tensors on the CPU.
        done: paths saved by an earlier run.
        group_of: name of the input a linear reads; equal names share one set of statistics. Without it, each linear
            is on its own.
        device: where the maths runs.
        part: (rank, processes): of several processes this one does its share of the groups. What a linear becomes does
            not depend on the process.

    Returns:
        Reports of the linears quantized by this call.

    Raises:
        ModelError: a planned linear has no weights, or others than planned.
        StatsError, NonFiniteError: see :func:`omniw4.quantize.layer.quantize_groups`.
    """
    missing = [entry.path for entry in plan.quantized if entry.path not in weights]
    if missing:
        raise ModelError(f"the model has no linear {missing[0]!r} ({len(missing)} of the plan are missing)")
    finished = sum(entry.path in done for entry in plan.quantized)
    reports: list[LayerReport] = []
    batches = [
        batch  # made whole or not at all, so that its bytes do not depend on what was done before
        for batch in share_of(plan.batches(group_of, batch_limit(device)), *part)
        if not all(entry.path in done for group in batch for entry in group)
    ]

    def make(batch: list[list[PlanEntry]]) -> list[tuple[str, QuantizedLinear, LayerReport]]:
        return _quantize_batch(batch, weights, plan, recipe, stats_for, device)

    with _ordered(make, batches, side_by_side(plan, group_of, device)) as results:
        for path, quantized, report in chain.from_iterable(results):
            if path in done:
                continue
            save(path, quantized, report)
            reports.append(report)
            finished += 1
            if on_progress is not None:
                on_progress(Progress(finished, len(plan.quantized), report))
    return reports


def _quantize_batch(
    batch: list[list[PlanEntry]],
    weights: Mapping[str, WeightSource],
    plan: Plan,
    recipe: Recipe,
    stats_for: Callable[[str], LinearStats | None],
    device: torch.device | str,
) -> list[tuple[str, QuantizedLinear, LayerReport]]:
    """The linears of a batch on the CPU; nothing else of it outlives the call, so that batches never add up."""
    stats = [_stats_of(group, stats_for, device) if plan.needs_stats else None for group in batch]
    groups = [[_load(entry, weights[entry.path], device) for entry in group] for group in batch]
    return [
        (linear.path, quantized.to("cpu"), report)
        for linears, results in zip(groups, quantize_groups(groups, stats, recipe), strict=True)
        for linear, (quantized, report) in zip(linears, results, strict=True)
    ]


def batch_limit(device: torch.device | str) -> int:
    """Working memory of linears quantized as one batch: on a CPU one input's, on a GPU what a small one has room for.

    A constant, not what is free: the same run makes the same batches, and so the same bytes, on every GPU.
    """
    return 0 if torch.device(device).type == "cpu" else GPU_BATCH_BYTES


def side_by_side(plan: Plan, group_of: Callable[[str], str] | None, device: torch.device | str) -> int:
    """How many batches are quantized at once, each in a thread of its own and, on a CPU, on a core of its own.

    The steps of one input are too small to be shared by cores, and inputs are many.
    """
    if torch.device(device).type != "cpu":
        return 1
    room = SIDE_BY_SIDE_BYTES // max(plan.peak_bytes(group_of), 1)
    return max(min(torch.get_num_threads(), room, SIDE_BY_SIDE), 1)


@contextmanager
def _ordered(function: Callable[[Item], Made], items: Sequence[Item], workers: int) -> Iterator[Iterator[Made]]:
    """``map(function, items)``, so many at once in threads of one core each; with one worker it runs here, on all.

    Leaving early (an error, an interruption) waits for what is under way and drops the rest.
    """
    if workers == 1:
        yield map(function, items)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # here and in threads that begin now
    pool = ThreadPoolExecutor(workers)
    try:
        yield _in_order(pool, function, items, 2 * workers)  # what is done waits for its turn, and is small
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Made], items: Sequence[Item], ahead: int
) -> Iterator[Made]:
    """Results in the order of the items; no more than ``ahead`` are begun before the first of them is taken."""
    under_way: deque[Future[Made]] = deque()
    for item in items:
        if len(under_way) == ahead:
            yield under_way.popleft().result()
        under_way.append(pool.submit(function, item))
    while under_way:
        yield under_way.popleft().result()


def share_of(batches: list[list[list[PlanEntry]]], rank: int, processes: int) -> list[list[list[PlanEntry]]]:
    """The batches of one process, in their order: the largest first to whoever has the least to do."""
    cost = [
        sum(group[0].in_features ** 2 * (group[0].in_features + sum(e.out_features for e in group)) for group in batch)
        for batch in batches
    ]
    load, mine = [0] * processes, set()
    for index in sorted(range(len(batches)), key=lambda i: -cost[i]):  # stable
        least = load.index(min(load))
        load[least] += cost[index]
        if least == rank:
            mine.add(index)
    return [batch for index, batch in enumerate(batches) if index in mine]


def _load(entry: PlanEntry, source: WeightSource, device: torch.device | str) -> Linear:
    weight, bias = source()
    wanted = (entry.out_features, entry.in_features)
    if tuple(weight.shape) != wanted or entry.spec is None:
        raise ModelError(f"{entry.path}.weight has shape {tuple(weight.shape)}, the plan was made for {wanted}")
    return Linear(entry.path, weight.to(device), None if bias is None else bias.to(device), entry.spec)


def _stats_of(
    group: list[PlanEntry], stats_for: Callable[[str], LinearStats | None], device: torch.device | str
) -> LinearStats:
    stats = stats_for(group[0].path)
    if stats is None:
        raise StatsError(
            f"the recipe needs calibration statistics of {group[0].path}, and there are none",
            hint="run omniw4 calibrate on this model, or use the data-free --config rtn",
        )
    return LinearStats(
        hessian=stats.hessian.to(device),
        hessian_normalized=stats.hessian_normalized.to(device),
        absmax=stats.absmax.to(device),
        rms=stats.rms.to(device),
        tokens=stats.tokens,
        excluded=stats.excluded,
    )
