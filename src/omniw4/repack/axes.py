"""Index maps as permutations of named axes, so that packing and unpacking are read off one declaration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class AxisMap:
    """A reordering of one array: the same axes, slowest first, before and after.

    ``rows`` and ``columns`` name the axes into which the two dimensions of the canonical matrix split; ``fragment``
    names all of them in the order in which the fragments store them. One axis of the rows and one of the columns has
    no size here: it counts the tiles. Axes that the maps of this package use: ``g`` is the manual's groupID (lane / 4),
    ``t`` its threadID_in_group (lane % 4), ``step`` a k32 half of a k64 group.
    """

    rows: str
    columns: str
    fragment: str
    sizes: dict[str, int] = field(default_factory=dict)

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """``[rows, columns]`` to an array with one dimension per axis of ``fragment``, contiguous."""
        canonical = f"{self.rows} {self.columns}".split()
        split = [*self._split(self.rows, matrix.shape[0]), *self._split(self.columns, matrix.shape[1])]
        order = [canonical.index(axis) for axis in self.fragment.split()]
        return matrix.reshape(split).permute(order).contiguous()

    def inverse(self, fragments: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The array that :meth:`forward` gave, in any shape, back to ``[rows, columns]``, contiguous."""
        canonical, stored = f"{self.rows} {self.columns}".split(), self.fragment.split()
        split = [*self._split(self.rows, rows), *self._split(self.columns, columns)]
        size_of = dict(zip(canonical, split, strict=True))
        order = [stored.index(axis) for axis in canonical]
        array = fragments.reshape([size_of[axis] for axis in stored])
        return array.permute(order).reshape(rows, columns).contiguous()

    def _split(self, axes: str, length: int) -> list[int]:
        names = axes.split()
        known = 1
        for name in names:
            known *= self.sizes.get(name, 1)
        return [self.sizes.get(name, length // known) for name in names]


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return -(-n // multiple) * multiple


def pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """``x`` lengthened with zeros at the end of ``dim``, contiguous; ``x`` itself where it is so already."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)
