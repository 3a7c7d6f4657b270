"""Give the quantized linears of a loaded model the tensors their kernels read: from the repack cache, or packed now."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from omniw4 import ops
from omniw4.checkpoint import Checkpoint
from omniw4.errors import StorageError
from omniw4.repack import cache
from omniw4.runtime.linear import W4A4Linear

log = logging.getLogger(__name__)


def prepare(
    model: nn.Module, checkpoint: Checkpoint, paths: Mapping[str, str], dtype: torch.dtype | None = None
) -> None:
    """Prepare every quantized linear for the device it is on; where only the reference runs, nothing is done.

    The cache beside the checkpoint is made when it is missing. A folder that cannot be written is no obstacle: the
    weights are then packed in memory.

    Args:
        paths: module path in ``model`` -> path in the checkpoint, of the linears to prepare.
        dtype: of the activations to come.
    """
    modules = {place: module for place in paths if isinstance(module := model.get_submodule(place), W4A4Linear)}
    with contextlib.ExitStack() as stack:
        caches: dict[str, cache.Cache | None] = {ops.CANONICAL: None}
        for place, module in modules.items():
            layout = ops.kernel_layout(module.device, module.spec.act_bits, module.spec.scale_type)
            if layout not in caches:
                caches[layout] = stack.enter_context(_cache(checkpoint, layout))
            packed = caches[layout]
            module.prepare(layout, dtype=dtype, packed=None if packed is None else packed.linear(paths[place]))


@contextlib.contextmanager
def _cache(checkpoint: Checkpoint, layout: str) -> Iterator[cache.Cache | None]:
    try:
        opened = cache.ensure(checkpoint.folder, checkpoint, layout)
    except StorageError as e:
        log.warning("no repack cache, packing %s in memory: %s", layout, e.message)
        yield None
        return
    with opened:
        yield opened
