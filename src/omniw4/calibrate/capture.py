"""Statistics of every linear's input, block by block (memory: the model, one block's sums, one set of inputs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from omniw4.calibrate.accumulate import Accumulator
from omniw4.calibrate.relay import Relay
from omniw4.calibrate.walk import Batch, BlockWalk, Group, Resident, Source
from omniw4.errors import ModelError, NonFiniteError
from omniw4.tensors import LinearStats

MAX_EXCLUDED = 0.1  # share of rows with NaN or inf above which calibration stops


class Sink(Protocol):
    """Where statistics go as soon as they are finished."""

    def begin(self, groups: list[Group]) -> None: ...

    def put(self, group: Group, stats: LinearStats) -> None: ...


def capture(
    model: nn.Module,
    source: Source,
    sink: Sink | None,
    *,
    batch_size: int = 1,
    on_block: Callable[[int, int, str], None] | None = None,
    resident: Resident | None = None,
    relay: Relay | None = None,
) -> None:
    """Run ``source`` through the model's blocks and hand each group's statistics to ``sink``.

    Args:
        model: in eval mode.
        source: a :class:`~omniw4.calibrate.sources.TokenSource` or ``HiddenSource``.
        sink: None in a process that hands its sums on to another.
        batch_size: samples a forward; changes speed and memory, and the statistics only by rounding.
        on_block: called after each block with (blocks done, blocks, path).
        resident: see :class:`~omniw4.calibrate.walk.BlockWalk`.
        relay: the processes that share the samples; None: this one has them all.

    Raises:
        UsageError: fewer batches than processes.
        ModelError: a model that cannot be walked block by block.
        NonFiniteError: more than 10 % of the rows that reach a linear hold NaN or inf.
    """
    relay = relay or Relay(0, 1)
    walk = BlockWalk(model, source, batch_size, resident, relay.share(len(source), batch_size))
    groups = walk.probe()
    if sink is not None:
        sink.begin([group for block in groups for group in block])
    for index, (path, _) in enumerate(walk.blocks):
        with walk.resident(index), _observing(model, groups[index]) as (accumulators, set_batch):
            sums = [accumulators[group.name] for group in groups[index]]
            relay.take(sums)
            walk.run(index, set_batch)
            if not relay.last:
                relay.hand_on(sums)
            del sums
            if sink is not None:
                for group in groups[index]:
                    sink.put(group, _finish(group, accumulators.pop(group.name)))
        if on_block is not None:
            on_block(index + 1, len(walk), path)


@contextmanager
def _observing(
    model: nn.Module, groups: list[Group]
) -> Iterator[tuple[dict[str, Accumulator], Callable[[Batch], None]]]:
    """Hooks that feed an accumulator for each group; the second value tells them the batch that comes."""
    accumulators: dict[str, Accumulator] = {}
    current: list[Batch] = []
    inputs: dict[str, torch.Tensor] = {}  # of each group in this batch

    def set_batch(batch: Batch) -> None:
        current[:] = [batch]
        inputs.clear()

    def lead(group: Group) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs[group.name] = args[0]
            accumulators[group.name].add(_counted_rows(args[0], current[0].mask, group.name))
            accumulators[group.name].excluded += current[0].excluded

        return hook

    def follow(group: Group, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if inputs.get(group.name) is not args[0]:
                raise ModelError(f"{name} reads the input of {group.name} in one sample, and another in the next")

        return hook

    handles = []
    try:
        for group in groups:
            device = next(model.get_submodule(group.name).parameters()).device
            accumulators[group.name] = Accumulator(group.in_features, device)
            for name in group.members:
                hook = lead(group) if name == group.name else follow(group, name)
                handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
        yield accumulators, set_batch
    finally:
        for handle in handles:
            handle.remove()


def _counted_rows(x: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
    """The rows ``[T, K]`` of an input ``[..., K]`` that are not padding."""
    rows = x.reshape(-1, x.shape[-1])
    if bool(mask.all()):
        return rows
    if rows.shape[0] != mask.numel():
        raise ModelError(
            f"{name} reads {rows.shape[0]} rows where the batch has {mask.numel()}: padding cannot be told apart",
            hint="calibrate on a text without padding, with --batch-size 1",
        )
    return rows[mask.flatten()]


def _finish(group: Group, accumulator: Accumulator) -> LinearStats:
    rows = accumulator.tokens + accumulator.excluded
    if accumulator.excluded > MAX_EXCLUDED * rows:
        raise NonFiniteError(
            f"{accumulator.excluded} of {rows} calibration rows that reach {group.name} hold NaN or inf, "
            f"more than {MAX_EXCLUDED:.0%}",
            hint="try --dtype float32 or bfloat16, and check the model's weights",
        )
    return accumulator.finish()
