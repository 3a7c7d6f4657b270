"""Each quantized linear against FP64, on inputs that the reference model sees on held-out text.

Two questions, apart: how far the quantized linear is from the original (the cost of quantization), and how far the op
that ran is from an FP64 evaluation of the same codes (the quality of the implementation; docs/numerics.md allows twice
the error that plain torch makes in that dtype).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omniw4 import int4
from omniw4.hadamard import hadamard64
from omniw4.quantize.rotate import transform_weight
from omniw4.tensors import LinearSpec, QuantizedLinear
from omniw4.verify.result import LayerCheck

HELD_SHARE = 0.95  # of the codes' error, of which the seed says that rank 16 holds it
TOLERANCE = 2.0  # times the error of plain torch in the same dtype


def capture_inputs(
    model: nn.Module, paths: Iterable[str], run: Callable[[], Any], tokens: int
) -> dict[str, torch.Tensor]:
    """Inputs of linears during ``run()``, at most ``tokens`` rows of each; a tensor that several read is kept once.

    Returns:
        ``{path: [T, K]}`` on the CPU, in the model's dtype; a linear that no token reached is absent.
    """
    inputs: dict[str, torch.Tensor] = {}
    last: list[torch.Tensor] = []  # the input seen last, and its copy

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            have = inputs.get(path)
            missing = tokens - (0 if have is None else have.shape[0])
            if missing <= 0 or x.numel() == 0:
                return
            if not last or last[0] is not x or have is not None:
                last[:] = [x, x.detach().reshape(-1, x.shape[-1])[:missing].to("cpu", copy=True)]
            inputs[path] = last[1] if have is None else torch.cat([have, last[1]])

        return hook

    handles = [model.get_submodule(p).register_forward_pre_hook(keep(p), with_kwargs=True) for p in paths]
    try:
        with torch.inference_mode():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def check_layer(
    path: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    linear: QuantizedLinear,
    module: Callable[[torch.Tensor], torch.Tensor],
    *,
    device: torch.device | str = "cpu",
    repack_identical: bool | None = None,
    error_ranks: bool = False,
) -> LayerCheck:
    """Judge one quantized linear.

    Args:
        x: ``[T, K]`` held-out inputs in the dtype the op runs in.
        weight, bias: ``[N, K]`` and ``[N]`` of the original linear.
        linear: the same linear as the checkpoint stores it.
        module: the op path, ``[T, K] -> [T, N]``.
        error_ranks: also find ``rank_95``, which takes all eigenvalues of a matrix of min(N, K) columns.
    """
    x, linear = x.to(device), linear.to(device)
    with torch.inference_mode():
        original = F.linear(x.double(), weight.to(device).double(), None if bias is None else bias.to(device).double())
        got = module(x).double()
        exact = evaluate_codes(x, linear, torch.float64)
        plain = evaluate_codes(x, linear, x.dtype).double()
        error = _ratio((got - original).square().sum(), original.square().sum())
        op_error = math.sqrt(_ratio((got - exact).square().sum(), exact.square().sum()))
        plain_error = math.sqrt(_ratio((plain - exact).square().sum(), exact.square().sum()))
    return LayerCheck(
        path=path,
        out_features=linear.out_features,
        in_features=linear.in_features,
        tokens=x.shape[0],
        relative_error=error,
        sqnr_db=math.inf if error == 0 else -10 * math.log10(error),
        op_error=op_error,
        op_tolerance=max(TOLERANCE * plain_error, torch.finfo(x.dtype).eps / 2),
        effective_bits=linear.effective_bits(),
        finite=bool(torch.isfinite(got).all()),
        repack_identical=repack_identical,
        rank_95=rank_holding(HELD_SHARE, weight.to(device), linear) if error_ranks else None,
    )


def rank_holding(share: float, weight: torch.Tensor, linear: QuantizedLinear) -> int:
    """The least rank whose best approximation holds ``share`` of the codes' error ``‖W' - Q‖²``.

    The seed's premise is that sixteen do. The error is that of the codes alone, in the space they are in, as the
    low-rank branch sees it.

    Args:
        share: from 0 to 1.
        weight: ``[N, K]`` of the original linear.
    """
    residual = (transform_weight(weight, linear.spec.rotation, linear.smooth) - linear.dequantize_codes()).double()
    gram = residual @ residual.T if residual.shape[0] <= residual.shape[1] else residual.T @ residual
    energy = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0).cumsum(0)
    return int((energy < share * energy[-1]).sum()) + 1 if float(energy[-1]) > 0 else 0


def evaluate_codes(x: torch.Tensor, linear: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    """``deq(q(x'))·deq(qweight)ᵀ + (x'·proj_down)·proj_upᵀ + bias`` with plain torch products in ``dtype``.

    The codes are those of the integer semantics (FP32, exact by contract), whatever ``dtype`` is.

    Args:
        x: ``[T, K]``.

    Returns:
        ``[T, N]`` of ``dtype``.
    """
    own = transform(x, linear, torch.float64).to(dtype)  # [T, K]
    act = own if linear.spec.act_bits == 16 else rounded(transform(x, linear, torch.float32), linear.spec, dtype)
    y = act @ linear.dequantize_codes(torch.float64).to(dtype).T
    if linear.proj_down is not None and linear.proj_up is not None:
        y = y + (own @ linear.proj_down.to(dtype)) @ linear.proj_up.to(dtype).T
    return y if linear.bias is None else y + linear.bias.to(dtype)


def rounded(x: torch.Tensor, spec: LinearSpec, dtype: torch.dtype) -> torch.Tensor:
    """``deq(q(x))`` for activations of 4 or 8 bits: ``[T, K]`` float32 in the transformed space to ``dtype``."""
    if spec.act_bits == 8:
        return int4.dequantize(*int4.quantize_tokens(x, spec.act_clip), dtype)
    if spec.scale_type == "integer":
        return int4.dequantize_integer(*int4.quantize_groups_integer(x, spec.act_clip), dtype)
    return int4.dequantize(*int4.quantize_groups(x, spec.act_clip), dtype)


def transform(x: torch.Tensor, linear: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    """``x' = (x / smooth)·H64`` of ``x [T, K]``, in ``dtype``.

    In float32 exactly the values the codes are defined on: multiplied by the rounded reciprocal, not divided.
    """
    y = x.to(dtype)
    if linear.smooth is not None:
        y = y * linear.smooth.to(dtype).reciprocal()
    return hadamard64(y) if linear.spec.rotation == "hadamard64" else y


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> float:
    """Their quotient; 0 when both are 0 (a linear whose output is exactly zero, reproduced exactly)."""
    top, bottom = float(numerator), float(denominator)
    if bottom == 0:
        return 0.0 if top == 0 else math.inf
    return top / bottom
