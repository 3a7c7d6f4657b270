"""Several processes for one run, as ``torchrun`` starts them: `torchrun --nproc-per-node 4 -m omniw4 quantize ...`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omniw4.errors import PeerError, UsageError


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
        """Meet the others; returns the device of this process, which of ``cuda`` is a GPU of its own.

        Raises:
            UsageError: they cannot meet.
        """
        if self.alone:
            return device
        import torch.distributed as dist

        from omniw4.calibrate.relay import working_group

        if not dist.is_initialized():
            try:
                dist.init_process_group("gloo")  # what is exchanged are sums, once a block, and signals
                working_group()
            except (RuntimeError, ValueError) as e:
                raise UsageError(
                    f"process {self.rank} cannot meet the other {self.world - 1}: {str(e).splitlines()[0]}",
                    hint="start them with torchrun, or unset RANK and WORLD_SIZE",
                ) from e
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device

    def wait(self) -> None:
        """Until all are here.

        Raises:
            PeerError: one of them ended before.
        """
        if not self.alone:
            import torch.distributed as dist

            from omniw4.calibrate.relay import noticing_peers, working_group

            with noticing_peers():
                dist.barrier(group=working_group())


class FirstProcess:
    """The run that the first process began, as another sees it in the folder they share.

    A process may outlive the first one, and go on while a new run, with another recipe, is at the same folder.

    Args:
        partial: the folder, after the first process made it.
    """

    def __init__(self, partial: Path) -> None:
        self._note = partial / "fingerprint.json"
        self._begun = self._read()

    def check(self) -> None:
        """Before anything is written. Raises PeerError when the folder is gone or another run's."""
        if self._begun is None or self._read() != self._begun:
            raise PeerError("process 0 of this run ended before its work was done")

    def _read(self) -> bytes | None:
        try:
            return self._note.read_bytes()
        except OSError:
            return None


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
