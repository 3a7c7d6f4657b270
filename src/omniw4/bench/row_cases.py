"""The ops that work row by row between the products of a dense layer: each at one width, with its check and traffic."""

from __future__ import annotations

import torch

from omniw4 import ops
from omniw4.bench.cases import EPS, TOLERANCE, Case, Setting


def row_cases(setting: Setting, m: int, k: int) -> list[Case]:
    """``rms_norm`` with a residual sum, ``swiglu`` and ``quantize_fp8`` over ``[m, k]``: memory alone."""
    generator = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(m, k, generator=generator).to(setting.dtype).to(setting.device) for _ in range(2))
    gate_up = torch.cat((x, delta), 1)
    weight = torch.linspace(0.5, 1.5, k).to(setting.dtype).to(setting.device)
    item = setting.dtype.itemsize

    def check_norm() -> tuple[float, float]:
        def norm(dtype: torch.dtype) -> torch.Tensor:
            total = (x + delta).to(dtype)
            return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.to(dtype)

        found = ops.rms_norm(x, delta, weight, EPS, False)[0]
        return _judged(found, norm(torch.float64), norm(setting.dtype))

    def check_swiglu() -> tuple[float, float]:
        def gated(dtype: torch.dtype) -> torch.Tensor:
            return torch.nn.functional.silu(x.to(dtype)) * delta.to(dtype)

        return _judged(ops.swiglu(gate_up, False)[0], gated(torch.float64), gated(setting.dtype))

    def check_fp8() -> tuple[float, float]:
        codes, scales = ops.quantize_fp8(x)
        wanted, same = ops.quantize_fp8_ref(x)
        wrong = (codes.view(torch.uint8) != wanted.view(torch.uint8)).sum() + (scales != same).sum()
        return float(wrong), 0.0

    return [
        Case(
            "rms_norm", m, 1, k, 5 * m * k, 4 * m * k * item,
            [lambda: ops.rms_norm(x, delta, weight, EPS, False)], check_norm,
        ),
        Case("swiglu", m, k, k, 4 * m * k, 3 * m * k * item, [lambda: ops.swiglu(gate_up, False)], check_swiglu),
        Case(
            "quantize_fp8", m, 1, k, 3 * m * k, m * k * (item + 1) + 4 * m,
            [lambda: ops.quantize_fp8(x)], check_fp8, note="error is the number of wrong codes and scales",
        ),
    ]  # fmt: skip


def _judged(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> tuple[float, float]:
    """Relative error, and the tolerance of docs/numerics.md from what plain torch makes of it."""
    norm = exact.norm().clamp_min(1e-300)
    errors = [float((y.double() - exact).norm() / norm) for y in (found, plain)]
    return errors[0], max(TOLERANCE * errors[1], float(torch.finfo(plain.dtype).eps))
