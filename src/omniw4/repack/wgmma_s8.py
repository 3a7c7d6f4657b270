"""Layout ``wgmma_s8``: operands of ``wgmma.m64nNk32`` s8, weights as A in registers, tokens as B in shared memory.

For sm_90a. The codes follow the map of :mod:`omniw4.repack.widened`; the scales of a block lie behind its codes, so
that one bulk copy brings both. ``proj_up`` is operand A of ``mma.m16n8k16`` and the low-rank activations are its
operand B. Source of the maps: PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma and "Matrix
Fragments for mma.m16n8k16 with floating point type"; drawn in docs/mma-layouts.md.

Of sixteen tokens, number ``4t + 2h + e`` sits in column ``2t + e`` of n8 tile h: the four tokens whose sums lane t
holds are neighbours, and their scales one 16-byte load.
"""

from __future__ import annotations

import torch

from omniw4.errors import LayoutError
from omniw4.int4 import GROUP_SIZE
from omniw4.repack.axes import AxisMap, pad, round_up
from omniw4.repack.operands import RANK_TILE, check_dtype, check_shape, take
from omniw4.repack.widened import pack_widened, unpack_widened, unsupported_widened
from omniw4.tensors import LinearSpec, QuantizedLinear

LAYOUT = "wgmma_s8"
VERSION = 3
N_TILE = 128
M_TILE = 16
K_TILE = 128  # bytes of a token's row in shared memory: two groups
BLOCK_CODES = 64 * GROUP_SIZE // 2  # bytes of the codes of 64 output features and a group
BLOCK_BYTES = BLOCK_CODES + 64 * 2  # and FP16 scales
INTEGER_BLOCK_BYTES = BLOCK_CODES + 64  # and scales of a byte each

_CHUNK = 16  # bytes the swizzle moves as one
_TOKENS = "m_block t half e"
_TOKEN_SIZES = {"t": 4, "half": 2, "e": 2}
_PROJ_UP = AxisMap(
    rows="n_block row8 g",
    columns="r_block r8 t i",
    fragment="r_block n_block g t r8 row8 i",
    sizes={"row8": 2, "g": 8, "r8": 2, "t": 4, "i": 2},
)
_PROJ_DOWN = AxisMap(
    rows="k_block k32 t k4 k2 i",
    columns="r_block r8 g",
    fragment="k_block r_block k32 k4 g t k2 r8 i",
    sizes={"k32": 2, "t": 4, "k4": 2, "k2": 2, "i": 2, "r8": 2, "g": 8},
)
_CODES = AxisMap(
    rows=_TOKENS,
    columns="k_block byte",
    fragment="k_block m_block half t e byte",
    sizes={**_TOKEN_SIZES, "byte": K_TILE},
)
_GROUP_SCALES = AxisMap(
    rows="m_block token",
    columns="k_block group",
    fragment="k_block m_block group token",
    sizes={"token": M_TILE, "group": 2},
)
_LORA_ACT = AxisMap(
    rows=_TOKENS,
    columns="r_block r8 pair i",
    fragment="r_block m_block half r8 t e pair i",
    sizes={**_TOKEN_SIZES, "r8": 2, "pair": 4, "i": 2},
)


def unsupported(spec: LinearSpec) -> str:
    """Why no kernel of this layout can run such a linear; empty when one can."""
    return unsupported_widened(spec, LAYOUT)


def pack(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Canonical tensors to fragment order.

    Returns:
        ``qweight [N'/64, K/64, 2176]`` uint8 (2048 bytes of codes, then 64 FP16 scales; with integer scales 2112, of
        one byte each), ``w_scales [N'/64, K/64, 0]`` (empty, the scales being in ``qweight``), with integer scales
        ``row_scales [N']`` float32, ``proj_up [R'/16, N'/16, 32, 8]`` (lane, two elements of each of a0..a3),
        ``proj_down [K/64, R'/16, 4, 32, 8]`` (k16 step, lane, two elements of each of a0..a3: operand A of a product
        whose operand B is a lane's sixteen columns of a group), and as :func:`omniw4.repack.operands.pack_rest` has
        them ``smooth`` and ``bias``. N' is N rounded up to 128, R' is R rounded up to 16; padding is zero.

    Raises:
        LayoutError: tensors of the linear that do not fit together.
    """
    packed = pack_widened(linear, N_TILE)
    codes, scales = packed["qweight"].flatten(2), packed["w_scales"]
    packed["qweight"] = torch.cat((codes, scales.flatten(2).view(torch.uint8)), 2)
    packed["w_scales"] = scales.new_empty((*codes.shape[:2], 0))
    if "proj_up" in packed:
        packed["proj_up"] = pack_proj_up(packed["proj_up"])
        packed["proj_down"] = pack_proj_down(packed["proj_down"])
    return packed


def pack_proj_up(proj_up: torch.Tensor) -> torch.Tensor:
    """``[N', R']``, multiples of 16, to ``[R'/16, N'/16, 32, 8]``."""
    n, rank = proj_up.shape
    return _PROJ_UP.forward(proj_up).reshape(rank // RANK_TILE, n // 16, 32, 8)


def pack_proj_down(proj_down: torch.Tensor) -> torch.Tensor:
    """``[K, R']``, multiples of 64 and 16, to ``[K/64, R'/16, 4, 32, 8]``."""
    k, rank = proj_down.shape
    return _PROJ_DOWN.forward(proj_down).reshape(k // GROUP_SIZE, rank // RANK_TILE, 4, 32, 8)


def unpack(packed: dict[str, torch.Tensor], spec: LinearSpec, n: int, k: int) -> QuantizedLinear:
    """Inverse of :func:`pack`, bit for bit.

    Raises:
        LayoutError: a tensor is missing, has another shape or dtype, or its padding is not zero.
    """
    padded, rank, groups = round_up(n, N_TILE), round_up(spec.rank, RANK_TILE), k // GROUP_SIZE
    integer = spec.scale_type == "integer"
    block, dtype = (INTEGER_BLOCK_BYTES, torch.uint8) if integer else (BLOCK_BYTES, torch.float16)
    blocks = take(packed, "qweight", (padded // 64, groups, block), torch.uint8)
    take(packed, "w_scales", (padded // 64, groups, 0), dtype)
    codes, scales = blocks[..., :BLOCK_CODES], blocks[..., BLOCK_CODES:].contiguous()
    widened = {
        **packed,
        "qweight": codes.reshape(padded // 64, groups, 4, 32, 16),
        "w_scales": scales.view(dtype).reshape(padded // 64, groups, 4, 8, 2),
    }
    if spec.rank > 0 and "proj_up" in packed:
        check_shape("proj_up", packed["proj_up"], (rank // RANK_TILE, padded // 16, 32, 8))
        widened["proj_up"] = _PROJ_UP.inverse(packed["proj_up"], padded, rank)
    if spec.rank > 0 and "proj_down" in packed:
        check_shape("proj_down", packed["proj_down"], (groups, rank // RANK_TILE, 4, 32, 8))
        widened["proj_down"] = _PROJ_DOWN.inverse(packed["proj_down"], k, rank)
    return unpack_widened(widened, spec, n, k, N_TILE)


def pack_activations(codes: torch.Tensor, a_scales: torch.Tensor, act_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens to operand order: the reference of what the quantizer kernel stores.

    Args:
        codes: ``[M, K]`` int8; with integer scales, these times the codes.
        a_scales: ``[M, K/64]`` float16 for 4 bits, ``[M, 1]`` for 8 bits; with integer scales ``[M, 1]`` float32.
        act_bits: 4 or 8; 8 also for what has integer scales.

    Returns:
        ``[⌈K/128⌉, M', 128]`` int8 and, in float32, ``[⌈K/128⌉, M'/16, 2, 16]`` or ``[M']``, M' being M rounded up to
        16; padding is zero.

    Raises:
        LayoutError: shapes or dtypes that do not fit together.
    """
    if codes.dim() != 2 or codes.shape[1] % GROUP_SIZE:
        raise LayoutError(f"codes have shape {list(codes.shape)}, wanted [M, K] with K a multiple of {GROUP_SIZE}")
    check_dtype("codes", codes, torch.int8)
    tokens, groups = codes.shape[0], codes.shape[1] // GROUP_SIZE
    m, k = round_up(tokens, M_TILE), round_up(codes.shape[1], K_TILE)
    rows = _CODES.forward(pad(pad(codes, 0, m), 1, k)).reshape(k // K_TILE, m, K_TILE)
    if a_scales.dtype != torch.float32 or act_bits == 4:
        check_dtype("a_scales", a_scales, torch.float16)
    check_shape("a_scales", a_scales, (tokens, groups if act_bits == 4 else 1))
    scales = pad(a_scales.float(), 0, m)
    if act_bits == 8:
        return _swizzle(rows), scales.flatten()
    scales = _GROUP_SCALES.forward(pad(scales, 1, k // GROUP_SIZE))
    return _swizzle(rows), scales.reshape(k // K_TILE, m // M_TILE, 2, M_TILE)


def unpack_activations(qact: torch.Tensor, a_scales: torch.Tensor, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`pack_activations` for ``m`` tokens of ``k`` columns: codes int8 and scales float16.

    What lies past them is cut unread.
    """
    padded_m, padded_k = round_up(m, M_TILE), round_up(k, K_TILE)
    check_shape("qact", qact, (padded_k // K_TILE, padded_m, K_TILE))
    codes = _CODES.inverse(_swizzle(qact), padded_m, padded_k)[:m, :k].contiguous()
    if a_scales.dim() == 1:
        check_shape("a_scales", a_scales, (padded_m,))
        return codes, a_scales[:m, None].half()
    check_shape("a_scales", a_scales, (padded_k // K_TILE, padded_m // M_TILE, 2, M_TILE))
    scales = _GROUP_SCALES.inverse(a_scales, padded_m, padded_k // GROUP_SIZE)
    return codes, scales[:m, : k // GROUP_SIZE].half()


def pack_lora_act(lora_act: torch.Tensor) -> torch.Tensor:
    """Low-rank activations ``[M, R]`` of a 16-bit dtype to operand B of ``wgmma.m64nNk16`` without swizzle,
    ``[R'/16, M'/8, 2, 8, 8]`` (core matrices of eight tokens by eight ranks), M' and R' rounded up to 16; padding is
    zero.

    Raises:
        LayoutError: not a matrix of 16-bit elements.
    """
    if lora_act.dim() != 2 or lora_act.element_size() != 2:
        raise LayoutError(f"lora_act is {lora_act.dtype} {list(lora_act.shape)}, wanted [M, R] float16 or bfloat16")
    m, rank = round_up(lora_act.shape[0], M_TILE), round_up(lora_act.shape[1], RANK_TILE)
    return _LORA_ACT.forward(pad(pad(lora_act, 0, m), 1, rank)).reshape(rank // RANK_TILE, m // 8, 2, 8, 8)


def unpack_lora_act(fragments: torch.Tensor, m: int, rank: int) -> torch.Tensor:
    """Inverse of :func:`pack_lora_act`: ``[m, rank]``; what lies past them is cut unread."""
    padded_m, padded_rank = round_up(m, M_TILE), round_up(rank, RANK_TILE)
    check_shape("lora_act", fragments, (padded_rank // RANK_TILE, padded_m // 8, 2, 8, 8))
    return _LORA_ACT.inverse(fragments, padded_m, padded_rank)[:m, :rank].contiguous()


def _swizzle(rows: torch.Tensor) -> torch.Tensor:
    """16-byte chunk c of row r to place ``c XOR r % 8``; its own inverse. ``[k_block, M', 128]``."""
    row, chunk = torch.arange(rows.shape[1], device=rows.device), torch.arange(K_TILE // _CHUNK, device=rows.device)
    place = (chunk ^ row[:, None] % 8)[None, :, :, None]  # [1, M', 8, 1]
    chunks = rows.unflatten(2, (K_TILE // _CHUNK, _CHUNK))
    return chunks.gather(2, place.expand(chunks.shape)).flatten(2)
