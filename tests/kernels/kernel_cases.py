"""Problems and references for the kernel tests, made on the device the kernels run on."""

from __future__ import annotations

from functools import lru_cache

import torch

from omniw4 import int4, ops, repack
from omniw4.tensors import LinearSpec, QuantizedLinear
from shapes import Shape

DEVICE = torch.device("cuda", 0)
LAYOUT = "mma_s4"
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@lru_cache(maxsize=2)
def linear_on_gpu(n: int, k: int, rank: int, dtype: torch.dtype, bias: bool = True) -> QuantizedLinear:
    """Like :func:`problems.make_linear`, drawn on the GPU so that the largest takes no time."""
    g = torch.Generator(DEVICE).manual_seed(n * 31 + k + rank)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8, device=DEVICE)
    scales = (torch.rand(n, k // 64, generator=g, device=DEVICE) * 0.02 + 0.002).half()
    scales[n // 2, 0] = 0

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device=DEVICE) * std).to(dtype)

    return QuantizedLinear(
        LinearSpec(rank=rank),
        qweight=int4.pack_nibbles(codes),
        w_scales=scales,
        proj_down=normal(k, rank, std=k**-0.5) if rank else None,
        proj_up=normal(n, rank, std=0.3) if rank else None,
        bias=normal(n, std=0.5) if bias else None,
    )


def input_on_gpu(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Like :func:`problems.make_input`: normal, an outlier channel, a zero row, a zero group."""
    x = torch.randn(m, k, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    x[:, k // 3] *= 20
    if m > 2:
        x[1] = 0
        x[2, :64] = 0
    return x.to(dtype)


def quantize(x: torch.Tensor, linear: QuantizedLinear, layout: str = LAYOUT, act_bits: int = 4) -> Activations:
    down = None if linear.proj_down is None else torch.nn.functional.pad(linear.proj_down, (0, -linear.spec.rank % 16))
    return ops.quantize_lora_down(x, down, None, None, None, "hadamard64", act_bits, 0.95, layout)[:3]


def gemm(
    acts: Activations,
    linear: QuantizedLinear,
    dtype: torch.dtype,
    *,
    epilogue: str = "plain",
    residual: torch.Tensor | None = None,
    tokens: int,
    packed: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The GEMM through the kernels, weights packed here unless they come packed."""
    weights = repack.get(LAYOUT).pack(linear) if packed is None else packed
    qact, a_scales, lora_act = acts
    up = weights.get("proj_up")
    return ops.gemm_lora_up(
        qact, a_scales, weights["qweight"], weights["w_scales"], None if up is None else lora_act, up, linear.bias,
        residual, tokens, linear.out_features, 4, epilogue, dtype, LAYOUT,
    )  # fmt: skip


def canonical_codes(acts: Activations, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[M, K]`` int8 and scales ``[M, K/64]`` of activations in the kernels' layout."""
    qact, a_scales = repack.get(LAYOUT).unpack_activations(acts[0], acts[1], tokens)  # type: ignore[attr-defined]
    return int4.unpack_nibbles(qact), a_scales


def in_dtype(
    codes: torch.Tensor, a_scales: torch.Tensor, lora_act: torch.Tensor, linear: QuantizedLinear, dtype: torch.dtype
) -> torch.Tensor:
    """The linear over the same codes in plain torch, everything in ``dtype`` (FP64 is the judge)."""
    acts = int4.dequantize(codes, a_scales, torch.float64).to(dtype)
    weight = int4.dequantize(int4.unpack_nibbles(linear.qweight), linear.w_scales, torch.float64).to(dtype)
    y = acts @ weight.T
    if linear.proj_up is not None:
        y = y + lora_act[:, : linear.spec.rank].to(dtype) @ linear.proj_up.to(dtype).T
    return y if linear.bias is None else y + linear.bias.to(dtype)


def for_shape(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, QuantizedLinear]:
    return input_on_gpu(shape.m, shape.k, dtype), linear_on_gpu(shape.n, shape.k, shape.r, dtype)
