"""Random quantized linears and inputs for tests, and comparisons that name the first difference."""

from __future__ import annotations

import torch

from omniw4 import int4
from omniw4.tensors import LinearSpec, QuantizedLinear, Rotation
from shapes import Shape


def make_linear(
    n: int,
    k: int,
    rank: int = 16,
    *,
    act_bits: int = 4,
    rotation: Rotation = "hadamard64",
    smooth: bool = False,
    bias: bool = True,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> QuantizedLinear:
    """A linear with codes over the whole range, one group of scale zero, and a low-rank branch that matters."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8)
    scales = (torch.rand(n, k // 64, generator=g) * 0.02 + 0.002).half()
    scales[n // 2, 0] = 0
    spec = LinearSpec(act_bits=act_bits, rank=rank, rotation=rotation, smooth=smooth)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * std).to(dtype)

    return QuantizedLinear(
        spec,
        qweight=int4.pack_nibbles(codes),
        w_scales=scales,
        proj_down=normal(k, rank, std=k**-0.5) if rank else None,
        proj_up=normal(n, rank, std=0.3) if rank else None,
        smooth=(torch.rand(k, generator=g) + 0.5).to(dtype) if smooth else None,
        bias=normal(n, std=0.5) if bias else None,
    )


def make_input(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> torch.Tensor:
    """``[m, k]`` normal, with an outlier channel, a zero row and a zero group where there are rows enough."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[:, k // 3] *= 20
    if m > 2:
        x[1] = 0
        x[2, :64] = 0
    return x.to(dtype)


def for_shape(shape: Shape, **options: object) -> tuple[torch.Tensor, QuantizedLinear]:
    linear = make_linear(shape.n, shape.k, shape.r, **options)  # type: ignore[arg-type]
    return make_input(shape.m, shape.k), linear


def assert_same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Bit for bit (NaN equals NaN); the failure names the first index that differs."""
    assert found.dtype == wanted.dtype, f"{what}: dtype {found.dtype}, wanted {wanted.dtype}"
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
    differ = ~((found == wanted) | (found.isnan() & wanted.isnan())) if found.is_floating_point() else found != wanted
    if differ.any():
        index = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {index}: "
            f"{found[index].item()} wanted {wanted[index].item()}"
        )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``‖found - wanted‖ / ‖wanted‖`` in FP64."""
    difference = found.double() - wanted.double()
    return float(difference.norm() / wanted.double().norm().clamp_min(1e-300))
