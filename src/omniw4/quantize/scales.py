"""Choosing the scale of each weight group, and rounding to nearest with it.

Every choice ends on the grid that is stored (FP16, or an integer times the row's FP32 scale) before any code is made,
and codes follow :mod:`omniw4.int4`, so what is minimised is what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from omniw4 import int4
from omniw4.tensors import ScaleType

ScaleRule = Literal["absmax", "search"]

# Fractions of absmax that the grid may span. With 15 steps the best one for Gaussian groups of 64 lies near 0.85.
SHRINK_GRID = tuple(1.0 - 0.025 * step for step in range(17))  # 1.0 … 0.6
# The same range in integers: from the smallest m that spans absmax down by as many, at least to 0.6 of m = 16.
INTEGER_STEPS_DOWN = 6
_BLOCK = 2**16  # weights that a CPU searches scales for at once: as many as stay in its cache


class GroupScales(Protocol):
    """How the scales of groups are chosen, and what is stored of them."""

    @property
    def dtype(self) -> torch.dtype: ...

    def choose(self, group: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """One stored scale for each row of a group.

        Args:
            group: ``[..., G, N]`` float32: the G columns that share a scale, one group a row of N.
            importance: ``[..., G]`` weight of each column's squared error (a Hessian's diagonal).

        Returns:
            ``[..., N]`` of ``dtype``; 0 for an all-zero group.
        """
        ...

    def step(self, scales: torch.Tensor) -> torch.Tensor:
        """The distance of two codes, ``[..., N]`` float32, of stored scales ``[..., N]``."""
        ...


@dataclass(frozen=True)
class Float16Scales:
    """``"absmax"``: ``absmax/7``; ``"search"``: the fraction of it in :data:`SHRINK_GRID` with the least weighted
    squared error of rounding to nearest, the largest such fraction on a tie."""

    rule: ScaleRule
    dtype: torch.dtype = torch.float16

    def choose(self, group: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        absmax = group.abs().amax(-2)  # [..., N]
        if self.rule == "absmax":
            return int4.scale_from_absmax(absmax, int4.INT4_MAX)
        candidates = [int4.scale_from_absmax(absmax, int4.INT4_MAX, shrink) for shrink in SHRINK_GRID]
        return _least_error(group, importance, candidates, self.step)

    def step(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.float()


@dataclass(frozen=True)
class IntegerScales:
    """Multiples m in 1..16 of a given scale of the row. ``"absmax"``: the smallest m whose grid spans absmax (16 where
    none does); ``"search"``: of that one and the :data:`INTEGER_STEPS_DOWN` below it the one with the least weighted
    squared error, the largest on a tie."""

    rule: ScaleRule
    rows: torch.Tensor  # [..., N] float32
    dtype: torch.dtype = torch.uint8

    def choose(self, group: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        absmax = group.abs().amax(-2)  # [..., N]
        spanning = torch.ceil(absmax * (1 / int4.INT4_MAX) * reciprocal(self.rows))
        top = spanning.clamp(1, int4.INTEGER_SCALE_MAX)
        nothing = (absmax == 0) | (self.rows == 0)
        if self.rule == "absmax":
            best = top
        else:
            candidates = [(top - down).clamp(min=1) for down in range(INTEGER_STEPS_DOWN + 1)]
            best = _least_error(group, importance, candidates, self.step)
        return torch.where(nothing, torch.zeros_like(best), best).to(torch.uint8)

    def step(self, scales: torch.Tensor) -> torch.Tensor:
        return self.rows * scales.float()


def _least_error(
    group: torch.Tensor,
    importance: torch.Tensor,
    candidates: Sequence[torch.Tensor],
    step: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Per row of the group the candidate ``[..., N]`` with the least weighted squared error of rounding to nearest, the
    first on a tie."""
    size, n = group.shape[-2:]
    weight = importance.to(group.dtype).expand(group.shape[:-1]).reshape(-1, size)  # [L, G]
    steps = torch.stack([step(candidate) for candidate in candidates])  # [C, ..., N]
    inverses = reciprocal(steps).reshape(len(steps), -1, n)  # [C, L, N]
    errors, groups = torch.empty_like(inverses), group.reshape(-1, size, n)
    if group.device.type == "cpu":
        width = max(_BLOCK // size, 1)
        for i, (one, share) in enumerate(zip(groups, weight, strict=True)):
            for start in range(0, n, width):
                rows = slice(start, start + width)
                _squared_errors(one[:, rows], share, inverses[:, i, rows], errors[:, i, rows])
    else:
        _squared_errors(groups, weight, inverses, errors)
    errors = errors.view(steps.shape).mul_(steps.square_())
    best, least = candidates[0], errors[0]
    for candidate, error in zip(candidates[1:], errors[1:], strict=True):
        best = torch.where(error < least, candidate, best)
        least = torch.minimum(error, least)
    return best


def _squared_errors(group: torch.Tensor, weight: torch.Tensor, inverses: torch.Tensor, errors: torch.Tensor) -> None:
    """``Σ weight · (code - value)²`` of rounding ``[..., G, N]`` with each of the inverse steps ``[C, ..., N]``, in
    steps, written to ``errors`` of that shape."""
    values, codes = torch.empty_like(group), torch.empty_like(group)
    for inverse, error in zip(inverses, errors, strict=True):
        torch.mul(group, inverse[..., None, :], out=values)
        torch.round(values, out=codes).clamp_(int4.INT4_MIN, int4.INT4_MAX)
        error.copy_((weight[..., None, :] @ codes.sub_(values).square_()).squeeze(-2))


def choose_rows(weight: torch.Tensor, importance: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """The row scales that integer group scales are multiples of: the largest group's scale becomes m = 16.

    Args:
        weight: ``[..., N, K]`` float32, K a multiple of 64.
        importance: ``[..., K]`` weight of each column's squared error.
        rule: how the largest group's scale is found: as in :class:`Float16Scales`, in FP32.

    Returns:
        ``[..., N]`` float32; 0 for an all-zero row.
    """
    columns, share = _columns(weight, importance)
    scales = columns.abs().amax(-2) / int4.INT4_MAX  # [..., K/64, N]
    if rule == "search":
        scales = _least_error(columns, share, [scales * shrink for shrink in SHRINK_GRID], lambda step: step)
    return scales.amax(-2) / int4.INTEGER_SCALE_MAX


def reciprocal(step: torch.Tensor) -> torch.Tensor:
    """``1/step`` in FP32, 0 where the step is 0."""
    return torch.where(step == 0, torch.zeros_like(step), step.reciprocal())


@dataclass(frozen=True)
class Rounded:
    """Codes and the scales that belong to them."""

    codes: torch.Tensor  # [..., N, K] int8
    scales: torch.Tensor  # [..., N, K/64] float16, or uint8 with rows
    rows: torch.Tensor | None = None  # [..., N] float32

    def dequantize(self) -> torch.Tensor:
        """``[..., N, K]`` float32."""
        if self.rows is None:
            return int4.dequantize(self.codes, self.scales)
        return int4.dequantize_integer(self.codes, self.scales, self.rows[..., None])

    def steps(self) -> torch.Tensor:
        """The distance of two codes in each group, ``[..., N, K/64]`` float32."""
        return self.scales.float() if self.rows is None else self.rows[..., None] * self.scales.float()

    def __getitem__(self, index: int) -> Rounded:
        """One of a leading axis."""
        return Rounded(self.codes[index], self.scales[index], None if self.rows is None else self.rows[index])

    @staticmethod
    def stack(parts: Sequence[Rounded]) -> Rounded:
        """Along a new leading axis."""
        rows = [part.rows for part in parts if part.rows is not None]
        codes, scales = torch.stack([part.codes for part in parts]), torch.stack([part.scales for part in parts])
        return Rounded(codes, scales, torch.stack(rows) if rows else None)

    @staticmethod
    def join(parts: Sequence[Rounded]) -> Rounded:
        """Along N; the inverse of :meth:`split`."""
        rows = [part.rows for part in parts if part.rows is not None]
        codes, scales = torch.cat([part.codes for part in parts], -2), torch.cat([part.scales for part in parts], -2)
        return Rounded(codes, scales, torch.cat(rows, -1) if rows else None)

    def split(self, counts: Sequence[int]) -> list[Rounded]:
        """Along N."""
        rows = [None] * len(counts) if self.rows is None else self.rows.split(list(counts), -1)
        parts = zip(self.codes.split(list(counts), -2), self.scales.split(list(counts), -2), rows, strict=True)
        return [Rounded(*part) for part in parts]


def scales_for(weight: torch.Tensor, importance: torch.Tensor, rule: ScaleRule, scale_type: ScaleType) -> GroupScales:
    """How the groups of ``weight [..., N, K]`` get their scales; ``importance`` is ``[..., K]``."""
    if scale_type == "float16":
        return Float16Scales(rule)
    return IntegerScales(rule, choose_rows(weight, importance, rule))


def round_to_nearest(
    weight: torch.Tensor, importance: torch.Tensor, rule: ScaleRule, scale_type: ScaleType = "float16"
) -> Rounded:
    """Quantize without compensation: every weight to its nearest code.

    Args:
        weight: ``[..., N, K]`` float32, K a multiple of 64.
        importance: ``[..., K]`` weight of each column's squared error; used by ``"search"`` alone.
    """
    kind = scales_for(weight, importance, rule, scale_type)
    rows = kind.rows if isinstance(kind, IntegerScales) else None
    if isinstance(kind, IntegerScales):
        kind = IntegerScales(rule, kind.rows[..., None, :])  # beside the axis of groups
    columns, share = _columns(weight, importance)
    scales = kind.choose(columns, share).transpose(-1, -2).contiguous()  # [..., N, K/64]
    steps = scales.float() if rows is None else rows[..., None] * scales.float()
    codes = int4.encode(int4.split_groups(weight), steps[..., None], int4.INT4_MIN, int4.INT4_MAX)
    return Rounded(codes.reshape(weight.shape), scales, rows)


def _columns(weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., N, K]`` to ``[..., K/64, 64, N]``, and ``[..., K]`` to ``[..., K/64, 64]``."""
    *lead, n, k = weight.shape
    columns = weight.transpose(-1, -2).reshape(*lead, k // int4.GROUP_SIZE, int4.GROUP_SIZE, n)
    return columns, int4.split_groups(importance)
