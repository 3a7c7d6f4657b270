"""A sink for captured statistics that keeps everything in memory."""

from __future__ import annotations

from omniw4.calibrate.walk import Group
from omniw4.tensors import LinearStats


class Collected:
    """What a capture handed over: the groups it announced, and the statistics of every linear."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.stats: dict[str, LinearStats] = {}

    def begin(self, groups: list[Group]) -> None:
        self.groups = groups

    def put(self, group: Group, stats: LinearStats) -> None:
        assert group in self.groups
        self.stats.update(dict.fromkeys(group.members, stats))
