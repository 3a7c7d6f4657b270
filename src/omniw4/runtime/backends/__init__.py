"""Linear back ends of the Qwen3 engine, one a file: how norms, linears and the MLP of a layer are computed.

=============  ====================================================================================================
``fp16``       dense linears through cuBLAS in FP16, everything between them fused; also ``bf16``
``fp8``        e4m3 with one scale a token and one an output feature
``w4a4``       quantized linears with the activations their checkpoint says
``w4a8``       the same weights, INT8 activations
``reference``  plain torch, any device and dtype, dense and quantized linears alike
=============  ====================================================================================================
"""

from __future__ import annotations

import torch

from omniw4.errors import UsageError
from omniw4.runtime.qwen3 import Backend

BACKENDS = ("fp16", "bf16", "fp8", "w4a4", "w4a8", "reference")


def make(name: str, device: torch.device, dtype: torch.dtype, layout: str | None = None) -> Backend:
    """The back end of that name.

    Args:
        dtype: of the model's hidden states, for back ends that take any; ``fp16`` and ``bf16`` say theirs.
        layout: kernel family of the quantized back ends; None for the best compiled for the device.

    Raises:
        UsageError: no such back end, or a dtype or layout it does not have.
    """
    if name not in BACKENDS:
        raise UsageError(f"no back end {name!r}", hint=f"there are {', '.join(BACKENDS)}")
    if layout is not None and name not in ("w4a4", "w4a8"):
        raise UsageError(f"back end {name!r} has no layouts, found {layout!r}", hint="layouts are for w4a4 and w4a8")
    if name in ("fp16", "bf16"):
        from omniw4.runtime.backends.fp16 import DenseBackend

        return DenseBackend(name, device)
    if name == "fp8":
        from omniw4.runtime.backends.fp8 import FP8Backend

        return FP8Backend(device, dtype)
    if name in ("w4a4", "w4a8"):
        from omniw4.runtime.backends.w4 import W4Backend

        return W4Backend(name, device, dtype, layout)
    from omniw4.runtime.backends.torch_reference import ReferenceBackend

    return ReferenceBackend(dtype)
