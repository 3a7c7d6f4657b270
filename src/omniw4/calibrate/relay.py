"""Calibration by several processes, with the bytes that one process gives.

FP32 sums depend on their order, so processes do not sum apart. Each takes a stretch of the samples, and adds its rows
of a block to the sums that the process before it has handed on; the last one writes them. Nobody waits long: when a
process has handed on the sums of a block it is busy with the next one, so the processes work a block apart, and n of
them finish in (blocks + n - 1) / n of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from omniw4.calibrate.accumulate import Accumulator
from omniw4.errors import PeerError, UsageError


@dataclass(frozen=True)
class Relay:
    """The place of this process in the line."""

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
                with noticing_peers(self.rank + 1):
                    dist.send(tensor.cpu(), self.rank + 1, group=working_group())


@cache
def working_group() -> dist.ProcessGroup | None:
    """All processes; each may wait for the others' shares, which take hours of the largest models.

    In torch.distributed's default group, in which they meet, nobody waits longer than half an hour. All processes must
    ask for this one at the same time, once.
    """
    return dist.new_group(timeout=timedelta(days=7))


@contextmanager
def noticing_peers(rank: int | None = None) -> Iterator[None]:
    """Name the process that is gone, in place of the connection that was closed by its end.

    Args:
        rank: of the process spoken to; None for all.

    Raises:
        PeerError: torch.distributed failed inside the block; it has no class of its own for that.
    """
    try:
        yield
    except RuntimeError as e:
        who = "another process" if rank is None else f"process {rank}"
        raise PeerError(f"{who} of this run ended before its work was done") from e


def _receive(tensor: torch.Tensor, source: int) -> None:
    received = torch.empty_like(tensor, device="cpu")
    with noticing_peers(source):
        dist.recv(received, source, group=working_group())
    tensor.copy_(received)
