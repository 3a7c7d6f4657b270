"""Random linears for the tests of this folder, and a comparison that names the first difference."""

import torch

from omniw4.tensors import LinearSpec, QuantizedLinear

# N off every tile, on a tile, and past one; K of one group and of several.
SHAPES = [(8, 64), (24, 192), (64, 64), (136, 192), (192, 576), (128, 1536), (264, 64)]
RANKS = [0, 8, 16, 96, 256]


def random_linear(
    n: int,
    k: int,
    rank: int = 16,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    bias: bool = True,
    smooth: bool = True,
    act_bits: int = 4,
) -> QuantizedLinear:
    """Every tensor drawn from all bit patterns of its dtype, NaN and -0.0 among them."""
    g = torch.Generator().manual_seed(seed)

    def floats(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, generator=g, dtype=torch.int16).view(dtype)

    return QuantizedLinear(
        LinearSpec(rank=rank, smooth=smooth, act_bits=act_bits),
        qweight=torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
        w_scales=floats(n, k // 64, dtype=torch.float16),
        proj_down=floats(k, rank) if rank else None,
        proj_up=floats(n, rank) if rank else None,
        smooth=floats(k) if smooth else None,
        bias=floats(n) if bias else None,
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.view(torch.int16) if x.element_size() == 2 else x


def assert_same(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Same shape, dtype and bits; otherwise fails with the first differing index."""
    assert found.shape == wanted.shape, f"{name}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{name}: dtype {found.dtype}, wanted {wanted.dtype}"
    differing = (bits(found) != bits(wanted)).nonzero()
    if len(differing):
        index = tuple(differing[0].tolist())
        raise AssertionError(
            f"{name}: {len(differing)} differ, first at {index}: {found[index]}, wanted {wanted[index]}"
        )


def assert_same_linear(found: QuantizedLinear, wanted: QuantizedLinear) -> None:
    assert found.spec == wanted.spec
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        assert_same(found.tensors()[name], tensor, name)
        assert found.tensors()[name].is_contiguous(), name
