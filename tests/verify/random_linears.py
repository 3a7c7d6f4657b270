"""Small quantized linears of random weights."""

import torch

from omniw4 import int4
from omniw4.hadamard import hadamard64
from omniw4.tensors import LinearSpec, QuantizedLinear


def quantized(n=24, k=128, rank=16, seed=0, **spec):
    torch.manual_seed(seed)
    weight = torch.randn(n, k)
    rotated = hadamard64(weight)
    codes, scales = int4.quantize_groups(rotated)
    u, s, v = torch.linalg.svd(rotated - int4.dequantize(codes, scales), full_matrices=False)
    linear = QuantizedLinear(
        LinearSpec(rank=rank, **spec),
        int4.pack_nibbles(codes),
        scales,
        (v[:rank].T * s[:rank]).to(torch.float16) if rank else None,
        u[:, :rank].to(torch.float16) if rank else None,
    )
    return weight, linear
