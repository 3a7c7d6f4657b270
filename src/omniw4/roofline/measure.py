"""The ceilings of the GPU at hand, reached by torch's own kernels in this run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from omniw4.roofline.gpu import RATES, Gpu, of_device

SIDE = 8192  # of the square products: a millisecond on a fast GPU
COPY_BYTES = 1 << 30  # far beyond any L2

BestOf = Callable[[Sequence[Callable[[], Any]], torch.device], float]


def measured(device: torch.device, best_us: BestOf) -> Gpu:
    """The GPU of a CUDA device with measured rates.

    INT4 has no product in torch: where the data sheet knows a rate, the measured INT8 rate is raised by the sheet's
    ratio of the two, and stays out where there is none.

    Args:
        best_us: times a list of calls on the device and gives the best repetition in microseconds.
    """
    properties = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    sheet = of_device(properties.name)
    rates: dict[str, float | None] = dict.fromkeys(RATES)
    rates |= _products(device, capability, best_us)
    if sheet is not None and sheet.rates["int4"] and sheet.rates["int8"] and rates["int8"]:
        rates["int4"] = rates["int8"] * sheet.rates["int4"] / sheet.rates["int8"]
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * COPY_BYTES / best_us([lambda: target.copy_(source)], device) * 1e-3
    found = sheet or Gpu(
        properties.name, ".".join(map(str, capability)), properties.multi_processor_count, copied,
        properties.L2_cache_size / 1e6, rates,
    )  # fmt: skip
    how = f"measured in this run: products of {SIDE}³ in torch, a copy of {COPY_BYTES >> 20} MiB"
    return replace(
        found, multiprocessors=properties.multi_processor_count, memory_gbs=copied, rates=rates, sources=(how,),
        measured=True,
    )  # fmt: skip


def _products(device: torch.device, capability: tuple[int, int], best_us: BestOf) -> dict[str, float | None]:
    """Rates of square products, FP8 where the GPU has it (sm_89 and newer)."""
    half = torch.randn(SIDE, SIDE, device=device, dtype=torch.float16)
    integers = torch.randint(-8, 8, (SIDE, SIDE), dtype=torch.int8, device=device)
    rates: dict[str, float | None] = {
        "fp16": _rate(best_us([lambda: half @ half], device)),
        "int8": _rate(best_us([lambda: torch._int_mm(integers, integers.t())], device)),
    }
    if capability >= (8, 9):
        eight, one = half.to(torch.float8_e4m3fn), torch.ones((), device=device)

        def product() -> torch.Tensor:
            return torch._scaled_mm(eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.float16)

        rates["fp8"] = _rate(best_us([product], device))
    return rates


def _rate(us: float) -> float:
    """10^12 operations a second."""
    return 2 * SIDE**3 / us * 1e-6
