"""The plan: what will be done to each linear, decided before anything expensive, all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from omniw4 import int4
from omniw4.config import Override, Recipe
from omniw4.errors import PlanError
from omniw4.patterns import globs_for, select
from omniw4.tensors import LinearSpec

_SHOWN = 5  # linears named in an error before the rest is counted


class Shape(Protocol):
    """What the plan asks about a linear."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def bias(self) -> bool: ...


@dataclass(frozen=True)
class PlanEntry:
    """One linear: how it is quantized, or why it is not."""

    path: str
    out_features: int
    in_features: int
    bias: bool
    spec: LinearSpec | None
    skip_reason: str = ""

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features

    def stored_bytes(self) -> int:
        """Codes, scales, low-rank branch and smoothing vector; the bias, the same before and after, is left out."""
        if self.spec is None:
            return 0
        n, k = self.out_features, self.in_features
        codes, groups = n * k // 2, n * (k // int4.GROUP_SIZE)
        scales = groups + 4 * n if self.spec.scale_type == "integer" else 2 * groups
        return codes + scales + 2 * self.spec.rank * (n + k) + (2 * k if self.spec.smooth else 0)


@dataclass(frozen=True)
class Plan:
    """Every linear of the model, in the model's order.

    Sizes are of the linears alone: embeddings, norms and heads stay as they are.
    """

    entries: tuple[PlanEntry, ...]
    needs_stats: bool
    source_bytes_per_weight: int

    @property
    def quantized(self) -> tuple[PlanEntry, ...]:
        return tuple(entry for entry in self.entries if entry.spec is not None)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        return tuple(entry for entry in self.entries if entry.spec is None)

    def bytes_before(self) -> int:
        """Of the linears to be quantized, in the source's dtype."""
        return sum(entry.weights for entry in self.quantized) * self.source_bytes_per_weight

    def bytes_after(self) -> int:
        """Of the same linears, quantized."""
        return sum(entry.stored_bytes() for entry in self.quantized)

    def effective_bits(self) -> float:
        """Stored bits a weight over all quantized linears, low-rank branch included."""
        weights = sum(entry.weights for entry in self.quantized)
        return 8 * self.bytes_after() / weights if weights else 0.0

    def warnings(self) -> list[tuple[str, str]]:
        """What is worth knowing before it is done: sentences, each with a hint."""
        wide = [e for e in self.quantized if e.spec is not None and e.spec.rank > min(e.out_features, e.in_features)]
        if not wide:
            return []
        widest = min(wide, key=lambda e: min(e.out_features, e.in_features))
        most = min(widest.out_features, widest.in_features)
        which = f"{len(wide)} linears, such as {widest.path}" if len(wide) > 1 else widest.path
        sizes = f"{widest.out_features}×{widest.in_features}"
        glob = globs_for([e.path for e in wide], [e.path for e in self.quantized])[0]
        text = (
            f"rank {widest.spec.rank if widest.spec else 0} is more than {which} ({sizes}) can have: the rest is zeros"
        )
        return [(text, f"save their space with `--override '{glob}:rank={most}'`")]

    def input_groups(self, group_of: Callable[[str], str] | None = None) -> list[list[PlanEntry]]:
        """Quantized linears that go together: they share input, rotation, smoothing and scale type.

        Groups come in the order in which the first of each appears.

        Args:
            group_of: name of the input a linear reads; None, or a plan without statistics: each is on its own.
        """
        groups: dict[tuple[object, ...], list[PlanEntry]] = {}
        for entry in self.entries:
            if entry.spec is not None:
                name = group_of(entry.path) if group_of is not None and self.needs_stats else entry.path
                spec = entry.spec
                groups.setdefault((name, spec.rotation, spec.smooth, spec.scale_type), []).append(entry)
        return list(groups.values())

    def batches(self, group_of: Callable[[str], str] | None, limit: int) -> list[list[list[PlanEntry]]]:
        """Input groups of equal shapes that go through the quantizer at once, such as q, k and v of several blocks.

        Args:
            limit: working memory of a batch in bytes; a group that needs more is a batch of its own. 0: no batches.
        """
        batches: list[list[list[PlanEntry]]] = []
        latest: dict[object, list[list[PlanEntry]]] = {}
        for group in self.input_groups(group_of):
            kind = tuple((entry.out_features, entry.in_features, entry.bias, entry.spec) for entry in group)
            batch = latest.get(kind)
            if batch is None or (len(batch) + 1) * _working_bytes(group, self.needs_stats) > limit:
                batch = latest[kind] = []
                batches.append(batch)
            batch.append(group)
        return batches

    def peak_bytes(self, group_of: Callable[[str], str] | None = None, limit: int = 0) -> int:
        """Working memory of the largest batch, the model itself left out."""
        batches = self.batches(group_of, limit)
        sizes = (_LIBRARIES + len(b) * (_working_bytes(b[0], self.needs_stats) - _LIBRARIES) for b in batches)
        return max(sizes, default=0)

    def reading_bytes(self) -> int:
        """Memory of the host while an input's statistics, or a weight, go from disk to a GPU."""
        stats = _READ_STATS if self.needs_stats else 0
        sizes = (max(stats * e.in_features**2, _READ_WEIGHT * e.weights) for e in self.quantized)
        return max(sizes, default=0)

    def to_dict(self, group_of: Callable[[str], str] | None = None) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        return {
            "linears": [
                {
                    "path": entry.path,
                    "out_features": entry.out_features,
                    "in_features": entry.in_features,
                    "bias": entry.bias,
                    "spec": None if entry.spec is None else entry.spec.to_dict(),
                    "skip_reason": entry.skip_reason,
                }
                for entry in self.entries
            ],
            "bytes_before": self.bytes_before(),
            "bytes_after": self.bytes_after(),
            "effective_bits": self.effective_bits(),
            "peak_bytes": self.peak_bytes(group_of),
            "warnings": [text for text, _ in self.warnings()],
        }


@dataclass(frozen=True)
class _Bytes:
    """Bytes alive in one phase of quantizing a group, for each of the things that have a size."""

    weight: int = 0  # a weight of the group
    one: int = 0  # a weight of its largest linear
    hessian: int = 0  # an entry of [K, K]
    gram: int = 0  # an entry of the smaller Gram matrix of the largest linear, [min(N, K), min(N, K)]


# Counted in the code, and held to measurements by tests/reliability/test_memory.py.
_FACTOR = _Bytes(weight=4, hessian=66)  # Hessians as read, and transformed; FP64: damped, reversed, factor, inverse
_COLUMNS = _Bytes(weight=27, hessian=24)  # target, stack, GPTQ's copy, codes, errors, candidates of the grid search
_BRANCH = _Bytes(weight=10, one=14, hessian=24, gram=26)  # residual in FP64, its Gram matrix and LAPACK's workspace
_NEAREST = _Bytes(weight=24)
_NEAREST_BRANCH = _Bytes(weight=4, one=16, gram=26)
_READ_STATS = 13  # an entry of [K, K]: two Hessians, whole and as the triangles on disk, and a mask
_READ_WEIGHT = 8  # as it is on disk, and in FP32 or a copy
_LIBRARIES = 10 << 20  # buffers of BLAS and LAPACK, whatever the size


def _working_bytes(group: Sequence[PlanEntry], with_stats: bool) -> int:
    phases = [_FACTOR, _COLUMNS] if with_stats else [_NEAREST]
    if any(entry.spec is not None and entry.spec.rank for entry in group):
        phases.append(_BRANCH if with_stats else _NEAREST_BRANCH)
    k, weights = group[0].in_features, sum(entry.weights for entry in group)
    one, gram = max(e.weights for e in group), max(min(e.out_features, k) ** 2 for e in group)
    sizes = (p.weight * weights + p.one * one + p.hessian * k * k + p.gram * gram for p in phases)
    return _LIBRARIES + max(sizes)


def make_plan(
    shapes: Mapping[str, Shape], recipe: Recipe, scope: Iterable[str], *, source_bytes_per_weight: int = 2
) -> Plan:
    """Decide for every linear of the model.

    Args:
        shapes: every linear of the model by full path.
        recipe: its ``include`` patterns choose among all of them; empty, ``scope`` is chosen.
        scope: the default choice: the linears of the model's repeated blocks.
        source_bytes_per_weight: 2 for a 16-bit model, 4 for FP32.

    Raises:
        PatternError: an include, skip or override pattern is malformed or matches nothing.
        PlanError: linears that cannot be quantized as asked, all in one message, or none is left to quantize.
    """
    paths = list(shapes)
    chosen = set(scope) & set(paths)
    if recipe.include:
        chosen = {path for pattern in recipe.include for path in select(pattern, paths, flag="--include")}
    skipped_by: dict[str, str] = {}
    for pattern in recipe.skip:
        for path in select(pattern, paths, flag="--skip"):
            skipped_by.setdefault(path, pattern)
    kept = [path for path in paths if path in chosen and path not in skipped_by]
    specs = {path: base_spec(recipe) for path in kept}
    for override in recipe.overrides:
        for path in select(override.pattern, kept, flag="--override"):
            specs[path] = apply_override(specs[path], override)
    if not kept:
        used = dict.fromkeys(skipped_by[path] for path in paths if path in chosen)
        raise PlanError(
            f"none of the model's {len(paths)} linears is to be quantized"
            + (f": --skip {', '.join(map(repr, used))} takes out all {len(chosen)} that would be" if used else ""),
            hint="narrow --skip to the linears that are to stay as they are"
            if used
            else "--include takes patterns of linears outside the repeated blocks",
        )
    _check_groups({path: shapes[path] for path in kept}, recipe.group_size)
    reasons = {path: f"skipped by {pattern!r}" for path, pattern in skipped_by.items()}
    outside = "matched by no --include pattern" if recipe.include else "outside the repeated blocks"
    entries = tuple(
        PlanEntry(
            path=path,
            out_features=shape.out_features,
            in_features=shape.in_features,
            bias=shape.bias,
            spec=specs.get(path),
            skip_reason="" if path in specs else reasons.get(path, outside),
        )
        for path, shape in shapes.items()
    )
    return Plan(entries, recipe.needs_stats, source_bytes_per_weight)


def base_spec(recipe: Recipe) -> LinearSpec:
    """The recipe's spec of a linear that no override names."""
    return LinearSpec(
        weight_bits=recipe.weights.bits,
        act_bits=recipe.activations.bits,
        group_size=recipe.group_size,
        rank=recipe.lowrank.rank,
        rotation=recipe.rotation,
        smooth=recipe.smooth.enabled,
        act_clip=recipe.activations.clip,
        scale_type=recipe.weights.scale_type,
    )


def apply_override(spec: LinearSpec, override: Override) -> LinearSpec:
    """``spec`` with the fields that the override sets; a later override wins over an earlier one."""
    changes = override.model_dump(exclude_none=True, exclude={"pattern"})
    return replace(spec, **changes)


def _check_groups(shapes: Mapping[str, Shape], group_size: int) -> None:
    """Every in_features must be a multiple of the group size, and the group size must be the one there is."""
    misfits = [path for path, shape in shapes.items() if shape.in_features % group_size]
    if misfits:
        fitting = _fitting_sizes([shape.in_features for shape in shapes.values()])
        sizes = f"sizes that fit all linears: {', '.join(map(str, fitting))}" if fitting else "no size fits all linears"
        supported = "" if group_size == int4.GROUP_SIZE else f"; omniw4 supports {int4.GROUP_SIZE}"
        raise PlanError(
            f"group_size {group_size} does not divide in_features of {len(misfits)} linears: "
            f"{_listed(misfits, shapes)} ({sizes}{supported})",
            hint=f"leave {'it' if len(misfits) == 1 else 'all of them'} out with {skip_flags(misfits, shapes)}"
            if group_size == int4.GROUP_SIZE
            else f"set recipe.group_size to {int4.GROUP_SIZE}",
        )
    if group_size != int4.GROUP_SIZE:
        raise PlanError(
            f"group_size {group_size} is not supported, the kernels and the checkpoint have {int4.GROUP_SIZE}",
            hint=f"set recipe.group_size to {int4.GROUP_SIZE}",
        )


def skip_flags(wanted: Sequence[str], paths: Iterable[str]) -> str:
    """``--skip`` flags that leave out exactly these linears, for a hint."""
    return " ".join(f"--skip '{glob}'" for glob in globs_for(wanted, paths))


def _fitting_sizes(widths: Sequence[int]) -> list[int]:
    sizes = (16, 32, 64, 128, 256)
    return [size for size in sizes if all(width % size == 0 for width in widths)]


def _listed(paths: Sequence[str], shapes: Mapping[str, Shape]) -> str:
    shown = ", ".join(f"{path} ({shapes[path].in_features})" for path in paths[:_SHOWN])
    return shown + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
