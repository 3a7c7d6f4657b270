"""Linears with integer group scales in mma_s8 and wgmma_s8, and proj_down as an operand: against plain products."""

from __future__ import annotations

from dataclasses import replace

import mma_simulator as sim
import pytest
import torch
from linear_samples import RANKS, SHAPES, assert_same, assert_same_linear, random_linear

from omniw4 import int4
from omniw4.errors import LayoutError
from omniw4.repack import mma_s8, wgmma_s8
from omniw4.tensors import QuantizedLinear


def integer_linear(n: int, k: int, rank: int = 0) -> QuantizedLinear:
    g = torch.Generator().manual_seed(n + k)
    linear = random_linear(n, k, rank)
    return replace(
        linear,
        spec=replace(linear.spec, scale_type="integer"),
        w_scales=torch.randint(0, 17, (n, k // 64), generator=g, dtype=torch.uint8),
        row_scales=torch.rand(n, generator=g),
    )


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rank", RANKS)
def test_pack_and_unpack_give_the_same_linear(n: int, k: int, rank: int) -> None:
    linear = integer_linear(n, k, rank)
    packed = wgmma_s8.pack(linear)
    assert packed["qweight"].shape == (-(-n // 128) * 2, k // 64, 2112)
    assert packed["row_scales"].shape == (-(-n // 128) * 128,)
    assert_same_linear(wgmma_s8.unpack(packed, linear.spec, n, k), linear)
    packed = mma_s8.pack(linear)
    assert packed["qweight"].shape == (-(-n // 64), k // 64, 4, 32, 16)
    assert (packed["w_scales"].shape, packed["w_scales"].dtype) == ((-(-n // 64), k // 64, 4, 8, 2), torch.uint8)
    assert packed["row_scales"].shape == (-(-n // 64) * 64,)
    assert_same_linear(mma_s8.unpack(packed, linear.spec, n, k), linear)


def test_unpack_refuses_what_does_not_fit() -> None:
    linear = integer_linear(24, 64)
    packed = wgmma_s8.pack(linear)
    with pytest.raises(LayoutError, match="row_scales is missing"):
        wgmma_s8.unpack({k: v for k, v in packed.items() if k != "row_scales"}, linear.spec, 24, 64)
    damaged = packed["row_scales"].clone()
    damaged[30] = 1
    with pytest.raises(LayoutError, match="row_scales has non-zero padding"):
        wgmma_s8.unpack({**packed, "row_scales": damaged}, linear.spec, 24, 64)
    with pytest.raises(LayoutError, match=r"qweight has shape .*, wanted \[2, 1, 2176\]"):
        wgmma_s8.unpack(packed, replace(linear.spec, scale_type="float16"), 24, 64)


def widen(words: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """The kernel's arithmetic on words ``[128, 4]`` with the scales ``[128, 2]`` of rows g and g + 8, modulo 2^32."""
    m = scales.repeat(1, 2).long()  # of registers 0..3
    offset = (128 - 8 * m) * 0x01010101
    return [((((words >> shift) & 0x0F0F0F0F) * m + offset) ^ 0x80808080) & 0xFFFFFFFF for shift in (0, 4)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_widened_weights_give_the_product_of_codes_and_scales(n: int, k: int) -> None:
    linear = integer_linear(n, k)
    packed = wgmma_s8.pack(linear)
    tokens = torch.randint(-128, 128, (16, k), generator=torch.Generator().manual_seed(3))
    rows, columns = sim.d_wgmma_m64(16)
    weights = int4.widen(int4.unpack_nibbles(linear.qweight), linear.w_scales).long()
    weights = torch.cat((weights, weights.new_zeros(packed["row_scales"].shape[0] - n, k)))
    wanted = tokens @ weights.T
    thread = torch.arange(128)
    for nb in range(len(weights) // 64):
        d = torch.zeros(128, 8, dtype=torch.int64)
        for kb in range(k // 64):
            block = packed["qweight"][nb, kb]
            pairs = block[2048:].reshape(32, 2)[thread // 4]  # rows g and g + 8 of each warp
            for step, a in enumerate(widen(sim.words(block[:2048].reshape(128, 16)), pairs)):
                start = kb * 64 + step * 32
                d += sim.wgmma_m64k32_s8(a, tokens[:, start : start + 32].T)
        assert_same(d, wanted[columns, nb * 64 + rows], f"nb={nb}")


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_mma_s8_widened_gives_the_product_of_codes_and_scales(n: int, k: int) -> None:
    linear = integer_linear(n, k)
    packed = mma_s8.pack(linear)
    tokens = torch.randint(-128, 128, (8, k), generator=torch.Generator().manual_seed(3))
    rows, columns = sim.d_m16n8()
    token_k, token = sim.b_m16n8k32_s8()
    weights = int4.widen(int4.unpack_nibbles(linear.qweight), linear.w_scales).long()
    weights = torch.cat((weights, weights.new_zeros(packed["row_scales"].shape[0] - n, k)))
    wanted = tokens @ weights.T
    for nb in range(len(weights) // 64):
        for warp in range(4):
            d = torch.zeros(32, 4, dtype=torch.int64)
            for kb in range(k // 64):
                pairs = packed["w_scales"][nb, kb, warp][torch.arange(32) // 4]  # of rows g and g + 8
                for step, a in enumerate(widen(sim.words(packed["qweight"][nb, kb, warp]), pairs)):
                    some = tokens[:, kb * 64 + step * 32 : kb * 64 + step * 32 + 32]
                    d += sim.mma_m16n8k32_s8(a, sim.words(some[token, token_k] & 0xFF))
            assert_same(d, wanted[columns, nb * 64 + warp * 16 + rows], f"nb={nb} warp={warp}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "rank"), [(64, 16), (192, 32), (128, 48)])
def test_proj_down_is_operand_a_of_a_lane_s_own_columns(k: int, rank: int, dtype: torch.dtype) -> None:
    """A lane holds columns 8t.. and 32+8t.. of a token's group; four of these neighbours a step are its operand B."""
    g = torch.Generator().manual_seed(6)
    down = torch.randint(-8, 9, (k, rank), generator=g).to(dtype)
    x = torch.randint(-8, 9, (8, k), generator=g).to(dtype)
    packed = wgmma_s8.pack_proj_down(down)
    assert packed.shape == (k // 64, rank // 16, 4, 32, 8)
    lane = torch.arange(32)
    token, t = lane // 4, lane % 4
    rows, columns = sim.d_m16n8()
    wanted = x.float() @ down.float()
    for tile in range(rank // 16):
        d = torch.zeros(32, 4)
        for group in range(k // 64):
            own = torch.cat((torch.arange(8), torch.arange(32, 40))) + 8 * t[:, None] + group * 64  # [32, 16]
            held = x[token[:, None], own]
            for step in range(4):
                d += sim.mma_m16n8k16_f16(packed[group, tile, step], held[:, 4 * step : 4 * step + 4])
        assert_same(d, wanted[columns, tile * 16 + rows], f"tile={tile}")
