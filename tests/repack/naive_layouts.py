"""The layouts as loops over elements: slow, and too plain to be wrong."""

import torch

from omniw4.tensors import QuantizedLinear


def nibble(qweight: torch.Tensor, row: int, k: int) -> int:
    """Code of column k as an unsigned nibble; zero past the last row."""
    return (int(qweight[row, k // 2]) >> (4 * (k % 2))) & 0xF if row < qweight.shape[0] else 0


def mma_s4_weights(linear: QuantizedLinear) -> tuple[torch.Tensor, torch.Tensor]:
    n_blocks, k_blocks = -(-linear.out_features // 128), linear.in_features // 64
    out = torch.zeros(n_blocks, k_blocks, 8, 32, 16, dtype=torch.uint8)
    scales = torch.zeros(n_blocks, k_blocks, 128, dtype=torch.float16)
    for n in range(linear.out_features):
        for k in range(linear.in_features):
            lane = (n % 8) * 4 + k % 32 // 8
            byte = (n % 16 // 8) * 8 + (k % 64 // 32) * 4 + k % 8 // 2
            out[n // 128, k // 64, n % 128 // 16, lane, byte] |= nibble(linear.qweight, n, k) << (4 * (k % 2))
        for kb in range(k_blocks):
            scales[n // 128, kb, n % 128] = linear.w_scales[n, kb]
    return out, scales


def mma_s4_activations(qact: torch.Tensor) -> torch.Tensor:
    m_blocks, k_blocks = -(-qact.shape[0] // 16), qact.shape[1] // 32
    out = torch.zeros(m_blocks, k_blocks, 32, 16, dtype=torch.uint8)
    for m in range(qact.shape[0]):
        for k in range(qact.shape[1] * 2):
            lane = (m % 8) * 4 + k % 32 // 8
            register = 2 * (k % 64 // 32) + m % 16 // 8
            out[m // 16, k // 64, lane, register * 4 + k % 8 // 2] |= nibble(qact, m, k) << (4 * (k % 2))
    return out


def lora_act(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(-(-x.shape[0] // 16), -(-x.shape[1] // 16), 32, 8, dtype=x.dtype)
    for m in range(x.shape[0]):
        for r in range(x.shape[1]):
            lane = (m % 8) * 4 + r % 8 // 2
            register = 2 * (r % 16 // 8) + m % 16 // 8
            out[m // 16, r // 16, lane, register * 2 + r % 2] = x[m, r]
    return out


def widened_weights(linear: QuantizedLinear, n_tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    n_blocks, k_blocks = -(-linear.out_features // n_tile) * n_tile // 64, linear.in_features // 64
    out = torch.zeros(n_blocks, k_blocks, 4, 32, 16, dtype=torch.uint8)
    scales = torch.zeros(n_blocks, k_blocks, 4, 8, 2, dtype=torch.float16)
    for n in range(linear.out_features):
        for k in range(linear.in_features):
            lane = (n % 8) * 4 + k % 16 // 4
            word = 2 * (k % 32 // 16) + n % 16 // 8
            step = k % 64 // 32
            code = nibble(linear.qweight, n, k) << (4 * step)
            out[n // 64, k // 64, n % 64 // 16, lane, word * 4 + k % 4] |= code
        for kb in range(k_blocks):
            scales[n // 64, kb, n % 64 // 16, n % 8, n % 16 // 8] = linear.w_scales[n, kb]
    return out, scales


def wgmma_weights(linear: QuantizedLinear) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = widened_weights(linear, 128)
    blocks, groups = codes.shape[:2]
    out = torch.zeros(blocks, groups, 2176, dtype=torch.uint8)
    for nb in range(blocks):
        for kb in range(groups):
            out[nb, kb, :2048] = codes[nb, kb].flatten()
            out[nb, kb, 2048:] = scales[nb, kb].flatten().view(torch.uint8)
    return out, torch.zeros(blocks, groups, 0, dtype=torch.float16)


def wgmma_proj_up(proj_up: torch.Tensor) -> torch.Tensor:
    n, rank = proj_up.shape
    out = torch.zeros(-(-rank // 16), -(-n // 128) * 8, 32, 8, dtype=proj_up.dtype)
    for f in range(n):
        for r in range(rank):
            lane = (f % 8) * 4 + r % 8 // 2
            register = 2 * (r % 16 // 8) + f % 16 // 8
            out[r // 16, f // 16, lane, register * 2 + r % 2] = proj_up[f, r]
    return out


def wgmma_row(m: int) -> int:
    """Where token m lies: of sixteen, 4t + 2h + e in row 8h + 2t + e."""
    t, h, e = m % 16 // 4, m % 4 // 2, m % 2
    return m // 16 * 16 + 8 * h + 2 * t + e


def wgmma_activations(codes: torch.Tensor, a_scales: torch.Tensor, act_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, k = codes.shape
    m16 = -(-tokens // 16)
    out = torch.zeros(-(-k // 128), m16 * 16, 128, dtype=torch.int8)
    scales = torch.zeros(m16 * 16) if act_bits == 8 else torch.zeros(-(-k // 128), m16, 2, 16)
    for m in range(tokens):
        row = wgmma_row(m)
        for column in range(k):
            chunk = column % 128 // 16 ^ row % 8
            out[column // 128, row, chunk * 16 + column % 16] = codes[m, column]
        if act_bits == 8:
            scales[m] = a_scales[m, 0]
        else:
            for group in range(k // 64):
                scales[group // 2, m // 16, group % 2, m % 16] = a_scales[m, group]
    return out, scales


def wgmma_lora_act(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(-(-x.shape[1] // 16), -(-x.shape[0] // 16) * 2, 2, 8, 8, dtype=x.dtype)
    for m in range(x.shape[0]):
        row = wgmma_row(m)
        for r in range(x.shape[1]):
            out[r // 16, row // 8, r % 16 // 8, row % 8, r % 8] = x[m, r]
    return out
