"""Laws of every layout: packing moves bits and neither makes nor loses any."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from omniw4 import int4, repack
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUTS = st.sampled_from(sorted(repack.LAYOUTS))
SIZES = st.tuples(st.integers(1, 200), st.integers(1, 4).map(lambda groups: 64 * groups))


def linear(n: int, k: int, rank: int, seed: int) -> QuantizedLinear:
    g = torch.Generator().manual_seed(seed)
    return QuantizedLinear(
        LinearSpec(rank=rank),
        torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
        (torch.rand(n, k // 64, generator=g) + 0.01).half(),
        torch.randn(k, rank, generator=g).half() if rank else None,
        torch.randn(n, rank, generator=g).half() if rank else None,
    )


@examples(40)
@given(LAYOUTS, SIZES, st.sampled_from([0, 1, 16, 40]), st.integers(0, 2**31))
def test_every_bit_comes_back(name: str, size: tuple[int, int], rank: int, seed: int) -> None:
    layout, whole = repack.get(name), linear(*size, rank, seed)
    back = layout.unpack(layout.pack(whole), whole.spec, *size)
    for part, tensor in whole.tensors().items():
        assert torch.equal(back.tensors()[part], tensor), f"{name}: {part}"


@examples(40)
@given(LAYOUTS, SIZES, st.integers(0, 2**31))
def test_one_code_lies_in_one_place(name: str, size: tuple[int, int], seed: int) -> None:
    """Another code at one place changes one nibble of the packed weights, and no two places share it."""
    layout, (n, k) = repack.get(name), size
    whole = linear(n, k, 0, seed)
    places = []
    for offset in (0, 1 + seed % (n * k - 1)):
        position = (seed + offset) % (n * k)
        codes = int4.unpack_nibbles(whole.qweight).flatten()
        codes[position] ^= 1
        other = QuantizedLinear(whole.spec, int4.pack_nibbles(codes.reshape(n, k)), whole.w_scales)
        before, after = layout.pack(whole)["qweight"].flatten(), layout.pack(other)["qweight"].flatten()
        changed = (before ^ after).nonzero().flatten()
        assert len(changed) == 1
        places.append((int(changed[0]), int(before[changed[0]] ^ after[changed[0]]) > 0x0F))
    assert places[0] != places[1]


@examples(30)
@given(LAYOUTS, SIZES, st.integers(0, 2**31))
def test_nothing_but_zeros_is_added(name: str, size: tuple[int, int], seed: int) -> None:
    layout, whole = repack.get(name), linear(*size, 0, seed)
    packed = layout.pack(whole)
    stored = torch.cat([packed["qweight"].flatten(), packed["w_scales"].flatten().view(torch.uint8)])
    wanted = torch.cat([whole.qweight.flatten(), whole.w_scales.flatten().view(torch.uint8)])
    assert _set_bits(stored) == _set_bits(wanted)


def _set_bits(data: torch.Tensor) -> int:
    return sum(int(((data >> bit) & 1).sum()) for bit in range(8))
