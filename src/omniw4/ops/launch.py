"""From checked tensors to a launch: addresses, alignment, the tensor's own device and current stream."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from omniw4.errors import KernelError, OpError
from omniw4.ops import extension
from omniw4.ops.checks import require, require_dtype

RANK_TILE, MAX_RANK = 16, 256
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous and at a multiple of 16 bytes, copied where it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes and are contiguous, copied where they are not."""
    row_bytes = x.stride(0) * x.element_size()
    fits = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (row_bytes % 16 == 0 or x.shape[0] == 1)
    if fits:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def launch(op: str, name: str, on: torch.Tensor, **arguments: Any) -> None:
    """Call a function of the module on the device and current stream of ``on``; its exceptions become ours.

    The first call loads every kernel, for the graph captures to come.
    """
    _call(extension.loaded(on.device), op, name, on, arguments)


def launch_alone(op: str, name: str, on: torch.Tensor, **arguments: Any) -> None:
    """As :func:`launch`, for an op that no graph has: of all kernels, its own is loaded. The device must be usable."""
    _call(extension.module(), op, name, on, arguments)


def _call(kernels: ModuleType, op: str, name: str, on: torch.Tensor, arguments: dict[str, Any]) -> None:
    function: Callable[..., None] = getattr(kernels, name)
    try:
        function(**arguments, device=on.device.index, stream=torch.cuda.current_stream(on.device).cuda_stream)
    except ValueError as e:
        raise OpError(f"{op}: {e}") from e
    except RuntimeError as e:
        raise KernelError(f"{op}: {e}") from e


def launch_gemm(
    op: str,
    qact: torch.Tensor,
    a_scales: torch.Tensor,
    qweight: torch.Tensor,
    w_scales: torch.Tensor | None,
    lora_act: torch.Tensor | None,
    proj_up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tokens: int,
    out_features: int,
    groups: int,
    epilogue: str,
    dtype: torch.dtype,
    *,
    rank: int,
    lora_act_packed: bool,
    **options: Any,
) -> torch.Tensor:
    """Call the GEMM of a family on operands whose shapes it has checked, into a new ``[M, N]``, or ``[M, N/2]`` gated.

    Args:
        w_scales: None where they are in qweight.
        lora_act, proj_up: as the family reads them; None without a branch.
        groups: of 64 input features.
        options: what the family alone is asked.
    """
    qact, a_scales, qweight = (aligned(t) for t in (qact, a_scales, qweight))
    w_scales = None if w_scales is None else aligned(w_scales)
    bias = None if bias is None else aligned(bias.to(dtype))
    residual = None if residual is None else aligned(residual)
    y = qact.new_empty((tokens, out_features // 2 if epilogue == "swiglu" else out_features), dtype=dtype)
    launch(
        op, "gemm_lora_up", qact, qact=qact.data_ptr(), a_scales=a_scales.data_ptr(), qweight=qweight.data_ptr(),
        w_scales=address(w_scales), lora_act=address(lora_act), proj_up=address(proj_up), bias=address(bias),
        residual=address(residual), y=y.data_ptr(), rows=tokens, out_features=out_features, in_features=groups * 64,
        rank=rank, lora_act_packed=lora_act_packed, epilogue=epilogue, dtype=NAMES[dtype], **options,
    )  # fmt: skip
    return y


def padded_rank(matrix: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """``[rows, R]`` to ``[rows, R']`` of dtype with zeros up to a multiple of 16; as it is where it fits."""
    rank = matrix.shape[1]
    require(rank <= MAX_RANK, op, f"the low-rank branch has rank {rank}, the kernels go up to {MAX_RANK}")
    return aligned(F.pad(matrix, (0, -rank % RANK_TILE)).to(dtype) if rank % RANK_TILE else matrix.to(dtype))


def low_rank_operands(
    op: str, lora_act: torch.Tensor | None, proj_up: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``lora_act`` and ``proj_up`` as families mma_s4 and mma_s8 read them: ``[M, R']`` float32, or packed in dtype,
    and ``[N', R']`` of dtype; None where there is no branch."""
    if lora_act is None or proj_up is None or proj_up.shape[1] == 0:
        return None, None
    up = padded_rank(proj_up, dtype, op)
    if lora_act.dim() != 4:
        return padded_rank(lora_act, torch.float32, op), up
    require_dtype(op, "packed lora_act", lora_act, dtype)
    return aligned(lora_act), up
