"""Linear back ends of the Qwen3 engine, one a file: how norms, linears and the MLP of a layer are computed."""

from __future__ import annotations

import torch

from omniw4.errors import UsageError
from omniw4.runtime.qwen3 import Backend

BACKENDS = ("reference",)


def make(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The back end of that name.

    Args:
        dtype: of the model's hidden states, for back ends that take any; ``fp16`` and ``bf16`` say it themselves.

    Raises:
        UsageError: no such back end, or one that does not run on the device.
    """
    if name not in BACKENDS:
        raise UsageError(f"no back end {name!r}", hint=f"there are {', '.join(BACKENDS)}")
    from omniw4.runtime.backends.torch_reference import ReferenceBackend

    return ReferenceBackend(dtype)
