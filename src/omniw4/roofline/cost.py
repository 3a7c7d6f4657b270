"""What a linear, an attention or a norm must compute and move, and how long a GPU takes for it. Pure arithmetic.

Two times are given for every kernel. ``ideal`` is the bare roofline, ``max(operations / rate, bytes / bandwidth)``: no
kernel is faster. ``predicted`` adds what keeps real kernels from it: a fixed cost for each launch, tiles that do not
fill the last round of multiprocessors, the share of the peak that a good kernel sustains, and what a quantizer computes
on CUDA cores (docs/roofline.md has the measurements behind the constants).

Source of the model: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniw4.roofline.gpu import Gpu

WIDTHS = ("fp16", "fp8", "w4a8", "w4a4")
GROUP = 64  # of INT4 scales
HALF, SCALE, FLOAT = 2, 2, 4  # bytes of a 16-bit number, of an FP16 scale, of an FP32 number

LAUNCH_US = 3.0  # a kernel inside a CUDA graph: start, first loads, last stores
TENSOR_SHARE = 0.75  # of the tensor cores' peak, where all multiprocessors are busy
ATTENTION_SHARE = 0.5  # the same for attention: softmax runs between the products
MEMORY_SHARE = 0.85  # of the memory's peak
CORE_SHARE = 0.55  # of the CUDA cores' issue slots, for the quantizers
QUANTIZER_INSTRUCTIONS = 34  # of a lane for each value: rotation, absmax, codes (docs/hopper.md)
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 128))  # rows and columns a block of a GEMM owns
QUERY_TILE = 128  # query rows a block of attention owns


@dataclass(frozen=True)
class Kernel:
    """One launch.

    ``ops``: operations by operand type, such as ``{"int8": 2·M·N·K, "fp16": 2·M·N·R}``; they take turns on the tensor
    cores. ``cuts``: the ways to cut the work, each as (blocks, share of the work that one block does, padding
    included); empty for a kernel that streams memory. ``instructions``: of CUDA cores, each of one lane.
    """

    name: str
    ops: dict[str, float]
    bytes: float
    cuts: tuple[tuple[int, float], ...] = ()
    share: float = TENSOR_SHARE
    instructions: float = 0.0

    def compute_us(self, gpu: Gpu) -> float:
        """Time of the operations at the peak rates."""
        return sum(count / _rate(gpu, kind) * 1e-6 for kind, count in self.ops.items())

    def memory_us(self, gpu: Gpu) -> float:
        """Time of the traffic at the peak bandwidth."""
        return self.bytes / gpu.memory_gbs * 1e-3

    def ideal_us(self, gpu: Gpu) -> float:
        return max(self.compute_us(gpu), self.memory_us(gpu))

    def predicted_us(self, gpu: Gpu) -> float:
        tensor_share, memory_share = (1.0, 1.0) if gpu.measured else (self.share, MEMORY_SHARE)
        sms = gpu.multiprocessors
        rounding = min((-(-blocks // sms) * sms * part for blocks, part in self.cuts), default=1.0)
        compute = self.compute_us(gpu) * rounding / tensor_share
        cores = (
            2e-6 * self.instructions / gpu.fp32 / CORE_SHARE if gpu.fp32 else 0.0
        )  # a fused multiply-add counts twice
        return LAUNCH_US + max(compute, cores, self.memory_us(gpu) / memory_share)


def supported(gpu: Gpu, width: str) -> bool:
    return width != "fp8" or gpu.rates["fp8"] is not None


def linear(gpu: Gpu, width: str, m: int, n: int, k: int, rank: int = 0) -> list[Kernel]:
    """The kernels of ``Y[M,N] = X[M,K]·W[N,K]ᵀ`` with X and Y in 16 bits.

    ``fp16`` is one GEMM. The others quantize X first: read once in 16 bits, written in theirs. Counted are weights,
    activations, scales, output and, for the INT4 widths, the low-rank branch in 16 bits with its FP32 activations.

    Args:
        width: one of :data:`WIDTHS`.
        rank: R of the low-rank branch, of the INT4 widths alone.
    """
    cuts = tuple((-(-m // rows) * -(-n // columns), rows * columns / (m * n)) for rows, columns in TILES)
    x, y = HALF * m * k, HALF * m * n
    products = 2.0 * m * n * k
    if width == "fp16":
        return [Kernel("gemm", {"fp16": products}, x + HALF * n * k + y, cuts)]
    if width == "fp8":
        acts = m * k + FLOAT * m
        gemm = Kernel("gemm", {"fp8": products}, acts + n * k + FLOAT * n + y, cuts)
        return [Kernel("quantize", {}, x + acts), gemm]
    integer = "int4" if width == "w4a4" and gpu.rates["int4"] else "int8"
    size = 0.5 if integer == "int4" else 1.0  # a GPU without INT4 products is handed bytes
    codes = size * m * k + SCALE * (m * k // GROUP if width == "w4a4" else m) + FLOAT * m * rank
    weights = 0.5 * n * k + SCALE * n * k // GROUP
    down, up = HALF * k * rank, HALF * n * rank
    low_rank = {"fp16": 2.0 * m * n * rank} if rank else {}
    return [
        Kernel(
            "quantize",
            {"fp16": 2.0 * m * k * rank} if rank else {},
            x + down + codes,
            instructions=float(QUANTIZER_INSTRUCTIONS) * m * k,
        ),
        Kernel("gemm", {integer: products, **low_rank}, codes + weights + up + y, cuts),
    ]


def attention(lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, *, causal: bool) -> list[Kernel]:
    """Attention over packed sequences, in 16 bits, scores never leaving the chip.

    Args:
        lengths: tokens of each sequence.
        causal: half of the square is computed.
    """
    share = 0.5 if causal else 1.0
    ops = sum(4.0 * length * length * heads * head_dim for length in lengths) * share
    moved = sum(lengths) * HALF * head_dim * (2 * heads + 2 * kv_heads)
    blocks = sum(-(-length // QUERY_TILE) * heads for length in lengths)
    longest = QUERY_TILE * max(lengths) / (heads * sum(length * length for length in lengths))
    return [Kernel("attention", {"fp16": ops}, moved, ((blocks, longest),), ATTENTION_SHARE)]


def norm(m: int, width: int, elements: int) -> list[Kernel]:
    """RMSNorm as one kernel: read, written, weighted; ``elements`` a token, ``width`` of them in a norm."""
    return [Kernel("norm", {}, 2 * HALF * m * elements + HALF * width)]


def rotary(m: int, features: int) -> list[Kernel]:
    """q/k-norm and rotary embedding in place, one kernel: ``features`` of q and k together, read and written."""
    return [Kernel("rotary", {}, 2 * HALF * m * features)]


def swiglu(m: int, features: int) -> list[Kernel]:
    """``silu(gate) · up`` as one kernel: two halves read, one written."""
    return [Kernel("swiglu", {}, 3 * HALF * m * features)]


def _rate(gpu: Gpu, kind: str) -> float:
    rate = gpu.rates[kind]
    if rate is None:
        raise ValueError(f"{gpu.name} has no {kind} rate")
    return rate
