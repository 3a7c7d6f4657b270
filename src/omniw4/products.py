"""Matrix products in FP32 and FP64. On a CPU those in FP32 go to oneDNN, which uses all of the CPU there is.

torch takes its FP32 products on a CPU from MKL, which on other CPUs than Intel's keeps to half of the vector width, and
asks oneDNN for other types alone. Both sum in FP32; they differ by the order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a·b``: ``[..., M, K]`` and ``[..., K, N]`` with equal leading axes, or the same without any."""
    if a.dim() == b.dim() == 2 and _suits(a, b):
        return _multiply(a, b)
    if a.dim() == b.dim() == 3 and len(a) == len(b) and len(a) and _suits(a[0], b[0]):
        found = [_multiply(*pair) for pair in zip(a, b, strict=True)]
        return found[0][None] if len(found) == 1 else torch.stack(found)
    return a @ b


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    """``total += scale·a·b``, in place: ``[..., M, N]``, ``[..., M, K]``, ``[..., K, N]`` with equal leading axes."""
    if total.dim() == 3:
        if len(total) and _suits(a[0], b[0]):
            for one, left, right in zip(total, a, b, strict=True):
                one.add_(_multiply(left, right), alpha=scale)
        else:
            total.baddbmm_(a, b, alpha=scale)
    elif total.dim() == 2:
        if _suits(a, b):
            total.add_(_multiply(a, b), alpha=scale)
        else:
            total.addmm_(a, b, alpha=scale)
    else:
        total.add_(a @ b, alpha=scale)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``torch.nn.functional.linear`` where nobody wants gradients."""
    rows = x.reshape(-1, x.shape[-1])
    if _suits(rows, weight.T):
        return _multiply(rows, weight.T, bias).reshape(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


def _find_onednn() -> torch._ops.OpOverload | None:
    """The op that torch's compiler calls for linears; there is no public one for FP32."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


_ONEDNN = _find_onednn()


def _suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether oneDNN takes ``[M, K]`` times ``[K, N]``, ``b`` being contiguous or the transposed view of a contiguous
    matrix: any other is read an element at a time."""
    if _ONEDNN is None or not a.device.type == b.device.type == "cpu" or not a.dtype == b.dtype == torch.float32:
        return False
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    return a.numel() > 0 and b.numel() > 0 and (b.is_contiguous() or b.T.is_contiguous())


def _multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert _ONEDNN is not None
    a = a if a.stride(1) == 1 or a.T.is_contiguous() else a.contiguous()
    found: torch.Tensor = _ONEDNN(a, b.T, bias, "none", [], "")
    return found
