"""The one enumerator of problem sizes (M tokens, N out_features, K in_features, R rank) for tests and bench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Shape(NamedTuple):
    """``Y[M, N] = X[M, K]·W[N, K]ᵀ`` with a low-rank branch of rank R."""

    m: int
    n: int
    k: int
    r: int = 16

    def __str__(self) -> str:
        return f"m{self.m}-n{self.n}-k{self.k}-r{self.r}"


# (N, K) of every linear, unfused and fused, by model
MODEL_LINEARS: dict[str, dict[str, tuple[int, int]]] = {
    "omnivoice": {
        "q_proj": (2048, 1024),
        "k_proj": (1024, 1024),
        "o_proj": (1024, 2048),
        "gate_proj": (3072, 1024),
        "down_proj": (1024, 3072),
        "qkv": (4096, 1024),
        "gate_up": (6144, 1024),
    },
    "smollm2-135m": {
        "q_proj": (576, 576),
        "k_proj": (192, 576),
        "gate_proj": (1536, 576),
        "down_proj": (576, 1536),
        "qkv": (960, 576),
        "gate_up": (3072, 576),
    },
    "llama-8b": {
        "q_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "gate_proj": (14336, 4096),
        "down_proj": (4096, 14336),
        "qkv": (6144, 4096),
        "gate_up": (28672, 4096),
    },
}

# one token, below, at and above a tile of 8, 16, 64 and 128, primes, and the large end
TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 61, 63, 64, 65, 127, 128, 129, 251, 257, 704, 1021, 2048, 4096, 8192)
RANKS = (0, 1, 8, 16, 17, 32, 96, 128, 256)


def small() -> list[Shape]:
    """Every kind of edge at sizes a CPU does in no time."""
    tails = [Shape(m, 24, 192) for m in (1, 2, 3, 7, 8, 15, 16, 17, 31, 61, 64, 65, 127, 129)]
    one_step = [Shape(5, n, 64) for n in (8, 16, 40, 128, 136)]
    off_tile = [Shape(m, n, k) for m, n, k in ((17, 8, 128), (33, 72, 320), (3, 200, 704), (67, 264, 448))]
    ranks = [Shape(19, 40, 256, r) for r in RANKS]
    model = [Shape(13, n, k) for n, k in MODEL_LINEARS["smollm2-135m"].values()]
    return tails + one_step + off_tile + ranks + model


def model_shapes(model: str, tokens: tuple[int, ...] = (1, 16, 256, 704, 2048)) -> list[Shape]:
    """Every linear of one model at the batch sizes worth timing; linears of equal shape appear once."""
    return [Shape(m, n, k) for n, k in dict.fromkeys(MODEL_LINEARS[model].values()) for m in tokens]


def full() -> list[Shape]:
    """Everything, for a GPU: :func:`small`, every M and every rank on one linear, every linear of every model."""
    n, k = MODEL_LINEARS["omnivoice"]["q_proj"]
    sweep = [Shape(m, n, k) for m in TOKENS] + [Shape(61, n, k, r) for r in RANKS]
    models = [shape for model in MODEL_LINEARS for shape in model_shapes(model, (1, 61, 704))]
    return list(dict.fromkeys([*small(), *sweep, *models]))


def ids(shapes: list[Shape]) -> Iterator[str]:
    """Names of parametrised cases."""
    return (str(shape) for shape in shapes)
