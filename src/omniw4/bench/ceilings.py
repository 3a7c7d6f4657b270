"""The two lines of the roofline, measured in the same run as the rows that are compared with them."""

from __future__ import annotations

import torch

from omniw4.bench.result import Ceiling
from omniw4.bench.timing import measure

_SIDE = 8192  # of the square INT8 product: 1.1e12 operations, a millisecond on a fast GPU
_COPY_BYTES = 1 << 30  # far beyond any L2


def measure_ceiling(device: torch.device | str, *, repetitions: int = 10) -> Ceiling | None:
    """What this GPU reaches on a large INT8 product and a large copy; None on a CPU.

    INT8 and not INT4: the kernels of this package widen INT4 on every GPU whose INT4 instruction is emulated, and
    torch has no INT4 product to measure. A GPU with native INT4 tensor cores can exceed this line up to twofold.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    a = torch.randint(-8, 8, (_SIDE, _SIDE), dtype=torch.int8, device=device)
    b = torch.randint(-8, 8, (_SIDE, _SIDE), dtype=torch.int8, device=device).t()
    product = measure([lambda: torch._int_mm(a, b)], device, repetitions=repetitions)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure([lambda: target.copy_(source)], device, repetitions=repetitions)
    return Ceiling(
        tops=2 * _SIDE**3 / product.min * 1e-6,
        gbs=2 * _COPY_BYTES / copy.min * 1e-3,
        source=f"torch._int_mm {_SIDE}³ and a copy of {_COPY_BYTES >> 20} MiB, best of {repetitions}",
    )


def roofline_share(ceiling: Ceiling | None, ops: int, bytes_moved: int, median_us: float) -> float | None:
    """Time the ceiling would need over the time taken; None without a ceiling."""
    if ceiling is None:
        return None
    return max(ops / ceiling.tops * 1e-6, bytes_moved / ceiling.gbs * 1e-3) / median_us
