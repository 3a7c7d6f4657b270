"""Calibration by several processes, with the bytes that one process gives.

FP32 sums depend on their order, so processes do not sum apart. Each takes a stretch of the samples, and adds its rows
of a block to the sums that the process before it has handed on; the last one writes them. Nobody waits long: when a
process has handed on the sums of a block it is busy with the next one, so the processes work a block apart, and n of
them finish in (blocks + n - 1) / n of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omniw4.calibrate.accumulate import Accumulator
from omniw4.errors import UsageError


@dataclass(frozen=True)
class Relay:
    """The place of this process in the line; its process group is torch.distributed's default one."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.world - 1

    def share(self, samples: int, batch_size: int) -> range:
        """The samples of this process: whole batches, as many as the others have or one more.

        Raises:
            UsageError: fewer batches than processes.
        """
        batches = -(-samples // batch_size)
        if batches < self.world:
            raise UsageError(
                f"{self.world} processes have {batches} batches of {batch_size} samples to share",
                hint="take more --samples, a smaller --batch-size or fewer processes",
            )
        begin, end = (batches * place // self.world * batch_size for place in (self.rank, self.rank + 1))
        return range(begin, min(end, samples))

    def take(self, sums: Sequence[Accumulator]) -> None:
        """Begin with the sums of the process before this one, in place; the first begins with zeros."""
        if self.first:
            return
        for one in sums:
            counts = torch.zeros(2, dtype=torch.int64)
            for tensor in (one.hessian, one.hessian_normalized, one.absmax, counts):
                _receive(tensor, self.rank - 1)
            one.tokens, one.excluded = counts.tolist()

    def hand_on(self, sums: Sequence[Accumulator]) -> None:
        """Give the sums to the process behind this one."""
        for one in sums:
            counts = torch.tensor([one.tokens, one.excluded])
            for tensor in (one.hessian, one.hessian_normalized, one.absmax, counts):
                dist.send(tensor.cpu(), self.rank + 1)


def _receive(tensor: torch.Tensor, source: int) -> None:
    received = torch.empty_like(tensor, device="cpu")
    dist.recv(received, source)
    tensor.copy_(received)
