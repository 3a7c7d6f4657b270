"""One MMA instruction at a time, simulated from the packed fragments, against the plain integer product."""

from dataclasses import replace

import mma_simulator as sim
import pytest
import torch
from linear_samples import assert_same, random_linear

from omniw4.int4 import unpack_nibbles
from omniw4.repack import mma_s4, mma_s8, wgmma_s8
from omniw4.tensors import QuantizedLinear

SHAPES = [(8, 64), (24, 192), (136, 128)]


def codes(packed: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, K/2] to [rows, K] int64, the rows added being zero."""
    values = unpack_nibbles(packed).to(torch.int64)
    return torch.cat((values, values.new_zeros(rows - values.shape[0], values.shape[1])))


def group_sums(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The plain integer product of each group of 64: [M, K], [N, K] to [K/64, M, N]."""
    return torch.einsum("mgk,ngk->gmn", tokens.unflatten(1, (-1, 64)), weights.unflatten(1, (-1, 64)))


def random_tokens(m: int, k: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    qact = torch.randint(0, 256, (m, k // 2), generator=g, dtype=torch.uint8)
    return qact, torch.rand(m, k // 64, generator=g).half()


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 16, 21])
def test_mma_s4_gives_the_integer_product(n: int, k: int, m: int) -> None:
    linear = random_linear(n, k, 0)
    qact, a_scales = random_tokens(m, k)
    weights = mma_s4.pack(linear)
    tokens, token_scales = mma_s4.pack_activations(qact, a_scales)
    rows, columns = sim.d_m16n8()
    padded_m, padded_n = tokens.shape[0] * 16, weights["qweight"].shape[0] * 128
    wanted = group_sums(codes(qact, padded_m), codes(linear.qweight, padded_n))
    w_scales = torch.cat((linear.w_scales, linear.w_scales.new_zeros(padded_n - n, k // 64)))
    x_scales = torch.cat((a_scales, a_scales.new_zeros(padded_m - m, k // 64)))
    for mb in range(tokens.shape[0]):
        for nb in range(weights["qweight"].shape[0]):
            for kb in range(k // 64):
                a = sim.words(tokens[mb, kb])
                for tile in range(8):
                    lanes = sim.words(weights["qweight"][nb, kb, tile])
                    for half in range(2):
                        d = sim.mma_m16n8k64_s4(a, lanes[:, 2 * half : 2 * half + 2])
                        in_block = tile * 16 + half * 8 + columns
                        m_index, n_index = mb * 16 + rows, nb * 128 + in_block
                        case = f"mb={mb} nb={nb} kb={kb} tile={tile} half={half}"
                        assert_same(d, wanted[kb][m_index, n_index], case)
                        assert_same(weights["w_scales"][nb, kb, in_block], w_scales[n_index, kb], f"w_scales {case}")
                        assert_same(token_scales[kb, m_index], x_scales[m_index, kb], f"a_scales {case}")


def widen(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two instructions of the kernel: registers of the first and of the second k32 step, bytes of 16·q."""
    return (words << 4) & 0xF0F0F0F0, words & 0xF0F0F0F0


def test_widening_gives_sixteen_times_every_code() -> None:
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    packed = (low | high << 4).to(torch.uint8).reshape(-1, 4)
    first, second = (sim.elements(step[:, None], 8) for step in widen(sim.words(packed)[:, 0]))
    wanted = unpack_nibbles(packed).to(torch.int64).unflatten(-1, (4, 2)) * 16
    assert torch.equal(first, wanted[..., 0])
    assert torch.equal(second, wanted[..., 1])


def k32_registers_b(tokens: torch.Tensor) -> torch.Tensor:
    """What each lane must hold of tokens ``[8, 32]`` int8 as operand B of m16n8k32, by the manual's table."""
    k, token = sim.b_m16n8k32_s8()
    return sim.words(tokens[token, k] & 0xFF)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("act_bits", [4, 8])
def test_mma_s8_gives_sixteen_times_the_integer_product(n: int, k: int, act_bits: int) -> None:
    linear = random_linear(n, k, 0)
    packed = mma_s8.pack(linear)
    limit = 1 << (act_bits - 1)
    tokens = torch.randint(-limit, limit, (8, k), generator=torch.Generator().manual_seed(2))
    rows, columns = sim.d_m16n8()
    padded_n, w_scales = padded(linear, packed)
    wanted = 16 * group_sums(tokens, codes(linear.qweight, padded_n))
    for nb in range(padded_n // 64):
        for kb in range(k // 64):
            for warp in range(4):
                d = torch.zeros(32, 4, dtype=torch.int64)
                for step, a in enumerate(widen(sim.words(packed["qweight"][nb, kb, warp]))):
                    start = kb * 64 + step * 32
                    d += sim.mma_m16n8k32_s8(a, k32_registers_b(tokens[:, start : start + 32]))
                n_index = nb * 64 + warp * 16 + rows
                case = f"nb={nb} kb={kb} warp={warp}"
                assert_same(d, wanted[kb][columns, n_index], case)
                found = packed["w_scales"][nb, kb, warp][rows % 8, rows // 8]
                assert_same(found, w_scales[n_index, kb], f"w_scales {case}")


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens_in_tile", [8, 32])
def test_wgmma_s8_gives_sixteen_times_the_integer_product(n: int, k: int, tokens_in_tile: int) -> None:
    linear = random_linear(n, k, 0)
    packed = wgmma_s8.pack(linear)
    tokens = torch.randint(-8, 8, (tokens_in_tile, k), generator=torch.Generator().manual_seed(3))
    rows, columns = sim.d_wgmma_m64(tokens_in_tile)
    padded_n, w_scales = padded(linear, packed)
    assert padded_n % 128 == 0
    wanted = 16 * group_sums(tokens, codes(linear.qweight, padded_n))
    for nb in range(padded_n // 64):
        for kb in range(k // 64):
            d = torch.zeros(128, tokens_in_tile // 2, dtype=torch.int64)
            block = packed["qweight"][nb, kb]
            for step, a in enumerate(widen(sim.words(block[:2048].reshape(128, 16)))):
                start = kb * 64 + step * 32
                d += sim.wgmma_m64k32_s8(a, tokens[:, start : start + 32].T)
            case = f"nb={nb} kb={kb}"
            assert_same(d, wanted[kb][columns, nb * 64 + rows], case)
            scales = block[2048:].view(torch.float16).reshape(4, 8, 2)
            found = scales[rows // 16, rows % 8, rows % 16 // 8]
            assert_same(found, w_scales[nb * 64 + rows, kb], f"w_scales {case}")


def test_wgmma_tokens_lie_where_a_lane_finds_four_neighbours() -> None:
    """Rows are the columns of the instruction's accumulators: of sixteen tokens, lane t holds 4t to 4t + 3."""
    codes = torch.arange(16, dtype=torch.int8)[:, None].expand(16, 128).contiguous()
    tokens, scales = wgmma_s8.pack_activations(codes, torch.arange(16)[:, None].expand(16, 2).half(), 4)
    _, columns = sim.d_wgmma_m64(16)  # [128 threads, 8 accumulators]
    held = tokens[0, columns, 0].reshape(128, 2, 2, 2)  # n8 tile, row g or g + 8, e
    t = torch.arange(128) % 4
    for row8 in range(2):
        neighbours = held[:, :, row8].reshape(128, 4)
        assert_same(neighbours, (4 * t[:, None] + torch.arange(4)).to(torch.int8), f"row {row8}")
    assert_same(scales[0, 0, 0], torch.arange(16).float(), "a_scales are in the order of the tokens")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "rank"), [(16, 16, 16), (21, 24, 40), (1, 8, 8)])
def test_wgmma_low_rank_fragments_give_the_product(m: int, n: int, rank: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    lora_act = torch.randint(-8, 9, (m, rank), generator=g).to(dtype)  # small integers: every product is exact
    up = torch.randint(-8, 9, (n, rank), generator=g).to(dtype)
    linear = replace(random_linear(n, 64, rank, dtype=dtype), proj_up=up)
    a, b = wgmma_s8.pack(linear)["proj_up"], wgmma_s8.pack_lora_act(lora_act)
    rows, columns = sim.d_m16n8()
    wanted = torch.zeros(a.shape[1] * 16, b.shape[1] * 8)
    wanted[:n, :m] = up.float() @ lora_act.float().T
    for n16 in range(a.shape[1]):
        for n8 in range(b.shape[1]):
            d = sum(sim.wgmma_m16n8k16_f16(a[step, n16], b[step, n8]) for step in range(a.shape[0]))
            token = n8 // 2 * 16 + columns // 2 * 4 + n8 % 2 * 2 + columns % 2
            assert_same(d, wanted[n16 * 16 + rows, token], f"n16={n16} n8={n8}")


def padded(linear: QuantizedLinear, packed: dict[str, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """N as packed, and the canonical scales with rows of zero up to it."""
    rows = packed["qweight"].shape[0] * 64
    return rows, torch.cat((linear.w_scales, torch.zeros(rows - linear.out_features, linear.w_scales.shape[1]).half()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "rank"), [(16, 16), (21, 40), (1, 8)])
def test_lora_act_fragments_give_the_product(m: int, rank: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    lora_act = torch.randint(-8, 9, (m, rank), generator=g).to(dtype)  # small integers: every product is exact
    proj_up = torch.randint(-8, 9, (8, rank), generator=g).to(dtype)
    fragments = mma_s4.pack_lora_act(lora_act)
    steps = fragments.shape[1]
    proj_up = torch.cat((proj_up, proj_up.new_zeros(8, steps * 16 - rank)), 1)
    k, n = sim.b_m16n8k16_f16()
    rows, columns = sim.d_m16n8()
    wanted = torch.zeros(fragments.shape[0] * 16, 8)
    wanted[:m] = lora_act.float() @ proj_up[:, :rank].float().T
    for mb in range(fragments.shape[0]):
        d = torch.zeros(32, 4)
        for step in range(steps):
            d += sim.mma_m16n8k16_f16(fragments[mb, step], proj_up[:, step * 16 : step * 16 + 16][n, k])
        assert_same(d, wanted[mb * 16 + rows, columns], f"mb={mb}")
