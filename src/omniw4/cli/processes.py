"""Several processes for one run, as ``torchrun`` starts them: `torchrun --nproc-per-node 4 -m omniw4 quantize ...`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from omniw4.errors import UsageError


@dataclass(frozen=True)
class Processes:
    """This process, and how many there are. All see the same files."""

    rank: int
    world: int

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.world - 1

    def join(self, device: str) -> str:
        """Meet the others; returns the device of this process, which of ``cuda`` is a GPU of its own."""
        if self.alone:
            return device
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")  # what is exchanged are sums, once a block, and signals
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device

    def wait(self) -> None:
        """Until all are here."""
        if not self.alone:
            import torch.distributed as dist

            dist.barrier()


def find() -> Processes:
    """From the environment that torchrun sets; a process without it is alone.

    Raises:
        UsageError: RANK or WORLD_SIZE is no number, or they do not fit.
    """
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if not world.isdecimal() or not rank.isdecimal() or int(rank) >= int(world):
        raise UsageError(
            f"RANK={rank!r} and WORLD_SIZE={world!r} are no process of several",
            hint="start them with torchrun, or unset both",
        )
    return Processes(int(rank), int(world))
