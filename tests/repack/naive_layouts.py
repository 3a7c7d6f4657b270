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
