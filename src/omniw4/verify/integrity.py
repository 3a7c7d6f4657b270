"""What must hold whatever the model says: finite numbers, and a repack that loses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from omniw4 import repack
from omniw4.errors import LayoutError
from omniw4.repack import cache
from omniw4.tensors import QuantizedLinear


def non_finite(linear: QuantizedLinear) -> list[str]:
    """Names of the float tensors of a linear that hold NaN or inf."""
    return [name for name, t in linear.tensors().items() if t.is_floating_point() and not torch.isfinite(t).all()]


def repack_losses(linear: QuantizedLinear, layouts: Iterable[str]) -> dict[str, str]:
    """Pack a linear into each layout and back; what came back otherwise than it was.

    A layout that does not take this kind of linear (its ``unsupported`` says why) is not judged.

    Returns:
        ``{layout: "qweight[3, 17]"}``, the first differing element of the first differing tensor.
    """
    losses = {}
    for name in layouts:
        layout = repack.get(name)
        if layout.unsupported(linear.spec):
            continue
        back = layout.unpack(layout.pack(linear), linear.spec, linear.out_features, linear.in_features)
        difference = first_difference(linear, back)
        if difference:
            losses[name] = difference
    return losses


def open_caches(folder: str | Path, checkpoint: cache.Source) -> tuple[list[cache.Cache], list[str]]:
    """The packed caches beside a checkpoint that are made of its present content, and what is wrong with the others.

    A cache of other content or of another version of its layout is never read, and is not judged.
    """
    caches, problems = [], []
    for entry in cache.entries(folder):
        if entry.layout in repack.LAYOUTS and entry.file == cache.cache_file(folder, entry.layout, checkpoint.hash):
            try:
                caches.append(cache.Cache.open(folder, checkpoint, entry.layout))
            except LayoutError as e:
                problems.append(e.message)
    return caches, problems


def cache_losses(path: str, linear: QuantizedLinear, caches: Iterable[cache.Cache]) -> dict[str, str]:
    """What the packed caches hold of a linear otherwise than it is; see :func:`repack_losses`."""
    losses = {}
    for one in caches:
        if path not in one.paths:
            continue
        try:
            difference = first_difference(linear, one.unpack(path))
        except LayoutError as e:
            difference = e.message
        if difference:
            losses[f"cache {one.file.name}"] = difference
    return losses


def first_difference(a: QuantizedLinear, b: QuantizedLinear) -> str:
    """The first tensor and element in which two linears differ bit for bit; empty when they are the same."""
    left, right = a.tensors(), b.tensors()
    if left.keys() != right.keys():
        return f"tensors {sorted(left)} became {sorted(right)}"
    for name, x in left.items():
        y = right[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} {x.dtype} {tuple(x.shape)} became {y.dtype} {tuple(y.shape)}"
        differing = (_bits(x) != _bits(y)).nonzero()
        if len(differing):
            return f"{name}[{', '.join(map(str, differing[0].tolist()))}]"
    return ""


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, so that NaN equals itself and 0 differs from -0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
