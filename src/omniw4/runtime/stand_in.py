"""Quantized linears that answer in the place of a model's own, which stay where they are.

:func:`omniw4.runtime.swap.swap` puts other modules into a model. Here the modules, their paths and the hooks on them
remain, and only what a linear makes of its input changes: so calibration sees the inputs of the very linears it knows,
as quantized predecessors make them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from torch import nn

from omniw4 import model as models
from omniw4.calibrate.walk import Resident
from omniw4.checkpoint import Checkpoint
from omniw4.runtime.swap import require_linears, twin
from omniw4.tensors import QuantizedLinear


@contextmanager
def stand_in(model: nn.Module, linears: Mapping[str, QuantizedLinear]) -> Iterator[None]:
    """Inside the with statement, these linears answer as :class:`~omniw4.runtime.linear.W4A4Linear` does.

    Args:
        model: its weights are on the device, and in the dtype, that the forwards will have.
        linears: quantized linears by full path in ``model``.

    Raises:
        ModelError: a path is not a linear of the model, or has another shape or bias; nothing is changed then.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    require_linears(linears, modules)
    twins = [(modules[path], twin(path, linear, modules[path])) for path, linear in linears.items()]
    saved = [linear.__dict__.get("forward") for linear, _ in twins]  # an instance may have one of its own
    try:
        for linear, other in twins:
            linear.forward = other.forward
        yield
    finally:
        for (linear, _), forward in zip(twins, saved, strict=True):
            if forward is None:
                linear.__dict__.pop("forward", None)
            else:
                linear.forward = forward


def stand_in_by_block(model: nn.Module, checkpoint: Checkpoint, resident: Resident | None = None) -> Resident:
    """For :func:`omniw4.calibrate.calibrate`: a block that is run answers with the checkpoint's linears.

    They are read when the block's turn comes and given up after it. Linears of the block that the checkpoint left as
    they were stay as they are, and so does everything outside the blocks.

    Args:
        resident: brings the block's own weights into memory before that, where they are not.
    """
    outer: Resident = resident or (lambda index: nullcontext())
    prefixes = [f"{path}." for path, _ in models.find_blocks(model)]

    @contextmanager
    def enter(index: int) -> Iterator[None]:
        paths = [path for path in checkpoint.specs if path.startswith(prefixes[index])]
        with outer(index), stand_in(model, {path: checkpoint.linear(path) for path in paths}):
            yield

    return enter
