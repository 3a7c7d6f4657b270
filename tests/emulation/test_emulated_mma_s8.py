"""The kernels of family mma_s8 on a CPU, instructions emulated: codes, integer sums, scales, tiles, epilogues.
What only a GPU shows is in tests/kernels."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import build_emulation as build
import pytest
import torch
import torch.nn.functional as F

from omniw4 import int4, ops
from omniw4.ops.layouts import activation_shapes
from omniw4.repack import mma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, relative_error

pytestmark = pytest.mark.skipif(bool(build.why_impossible()), reason=build.why_impossible() or "can be compiled")
HALF = torch.float16
KINDS = (("integer", 4), ("integer", 8), ("float16", 4), ("float16", 8))
TILES = (16, 64, 128)
EPILOGUES = {"plain": 0, "residual": 1, "swiglu": 2, "qknorm_rope": 3}
HEADS, KV_HEADS = 1, 1


@cache
def emulated() -> ModuleType:
    return build.load("emulated_mma_s8")


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def inputs(m: int, k: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(m + k + rank)
    x = torch.randn(m, k, generator=g)
    x[:, k // 3] *= 20
    if m > 2:
        x[1], x[2, :64] = 0, 0
    return x.half(), (torch.randn(k, rank, generator=g) * k**-0.5).half() if rank else None


def quantize(
    x: torch.Tensor, down: torch.Tensor | None, scale_type: str, bits: int, *options: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qact, a_scales and lora_act as the kernel leaves them, over memory full of other things."""
    m, k = x.shape
    padded = None if down is None else F.pad(down, (0, -down.shape[1] % 16))
    rank = 0 if padded is None else padded.shape[1]
    shapes = activation_shapes(mma_s8.LAYOUT, m, k, bits, x.dtype, scale_type)
    qact, a_scales = torch.full(shapes.qact, 99, dtype=torch.int8), torch.full(shapes.a_scales, float("nan"))
    lora_act = torch.full((m, rank), float("nan"))
    inv_rms, norm, inv_smooth = options or (None, None, None)
    status = emulated().quantize(
        address(x), address(inv_rms), address(norm), address(inv_smooth), address(padded), address(qact),
        address(a_scales), address(lora_act), m, k, rank, bits, 0.95, scale_type == "integer" and bits == 4,
    )  # fmt: skip
    assert status == 0
    return qact, a_scales, lora_act


def wanted_codes(
    x: torch.Tensor, scale_type: str, bits: int, *options: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    inv_rms, norm, inv_smooth = options or (None, None, None)
    codes, scales, _, outer = ops.quantize_lora_down_ref(
        x, None, inv_smooth, inv_rms, norm, "hadamard64", bits, 0.95, scale_type
    )
    if bits == 8:
        return mma_s8.pack_activations(codes, scales, 8)
    codes = int4.unpack_nibbles(codes)
    if scale_type == "float16":
        return mma_s8.pack_activations(codes, scales, 4)
    return mma_s8.pack_activations(int4.widen(codes, scales), outer[:, None], 8)


@pytest.mark.parametrize(("scale_type", "bits"), KINDS)
@pytest.mark.parametrize(("m", "k", "rank"), [(1, 64, 0), (17, 320, 16), (5, 1088, 40)])
def test_the_quantizer_writes_what_the_reference_does(m: int, k: int, rank: int, scale_type: str, bits: int) -> None:
    x, down = inputs(m, k, rank)
    qact, a_scales, lora_act = quantize(x, down, scale_type, bits)
    codes, scales = wanted_codes(x, scale_type, bits)
    assert_same(qact, codes, "qact")
    assert_same(a_scales, scales, "a_scales")
    if down is not None:
        assert not lora_act[:, rank:].any()
        rotated = ops.transform(x, None, None, None, "hadamard64")
        exact = rotated.double() @ down.double()
        assert relative_error(lora_act[:, :rank], exact) <= 2 * relative_error(rotated.half() @ down, exact)


@pytest.mark.parametrize(("scale_type", "bits"), KINDS)
def test_norm_smoothing_and_values_at_the_edges(scale_type: str, bits: int) -> None:
    x, _ = inputs(16, 192, 0)
    x[0] = 0
    x[1, 0], x[2, 70], x[3, 191] = float("nan"), float("inf"), float("-inf")
    x[4], x[5], x[6] = 65504, 6.1e-5, 6e-8
    x[9, ::2], x[9, 1::2] = 3.5, -3.5
    g = torch.Generator().manual_seed(1)
    norm, inv_smooth = (torch.rand(192, generator=g) + 0.5).half(), (torch.rand(192, generator=g) + 0.5).reciprocal()
    for options in ((), (torch.rand(16, generator=g), norm, inv_smooth)):
        qact, a_scales, _ = quantize(x, None, scale_type, bits, *options)
        codes, scales = wanted_codes(x, scale_type, bits, *options)
        assert_same(qact, codes, "qact")
        assert_same(a_scales, scales, "a_scales")


def linear_of(n: int, k: int, rank: int, scale_type: str, g: torch.Generator) -> QuantizedLinear:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).half()

    integer = scale_type == "integer"
    return QuantizedLinear(
        LinearSpec(rank=rank, scale_type=scale_type),  # type: ignore[arg-type]
        torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
        torch.randint(0, 17, (n, k // 64), generator=g, dtype=torch.uint8)
        if integer
        else (torch.rand(n, k // 64, generator=g) * 0.1).half(),
        normal(k, rank) if rank else None,
        normal(n, rank) if rank else None,
        bias=normal(n),
        row_scales=torch.rand(n, generator=g) * 1e-2 if integer else None,
    )


def launch(
    linear: QuantizedLinear,
    acts: tuple[torch.Tensor, torch.Tensor],
    lora_act: torch.Tensor | None,
    bits: int,
    tile: int,
    epilogue: str = "plain",
    residual: torch.Tensor | None = None,
    heads: dict[str, int] | None = None,
) -> torch.Tensor:
    m, n, rank = len(acts[0]), linear.out_features, -(-linear.spec.rank // 16) * 16
    packed = mma_s8.pack(linear)
    y = torch.full((m, n // 2 if epilogue == "swiglu" else n), float("nan"), dtype=HALF)
    status = emulated().gemm_lora_up(
        address(acts[0]), address(acts[1]), address(packed["qweight"]), address(packed["w_scales"]),
        address(packed.get("row_scales")), address(lora_act), address(packed.get("proj_up")), address(linear.bias),
        address(residual), address(y), m, n, linear.in_features, rank,
        lora_act is not None and lora_act.dim() == 4, tile, EPILOGUES[epilogue], bits, heads or {},
    )  # fmt: skip
    assert status == 0
    return y


def gemm(m: int, n: int, k: int, rank: int, scale_type: str, bits: int, tile: int, epilogue: str) -> torch.Tensor:
    """One product, held against FP64."""
    g = torch.Generator().manual_seed(m + n + k + rank)
    linear = linear_of(n, k, rank, scale_type, g)
    limit = 8 if (scale_type, bits) == ("float16", 4) else 128
    codes = torch.randint(-limit, limit, (m, k), generator=g, dtype=torch.int8)
    per_group = limit == 8
    scales = torch.rand(m, k // 64 if per_group else 1, generator=g) * 0.1
    scales = scales.half() if scale_type == "float16" or bits == 8 else scales
    low = torch.randn(m, -(-rank // 16) * 16, generator=g).half().float() if rank else None  # zero in proj_up past R
    residual = torch.randn(m, n, generator=g).half() if epilogue == "residual" else None
    acts = mma_s8.pack_activations(codes, scales, 4 if per_group else 8)
    y = launch(linear, acts, low, bits, tile, epilogue, residual)
    if low is not None:
        packed_low = ops.pack_lora_act_ref(low, HALF)
        assert_same(launch(linear, acts, packed_low, bits, tile, epilogue, residual), y, "lora_act packed")

    spans = scales.double().repeat_interleave(k // scales.shape[1], 1)
    acc = (codes.double() * spans) @ linear.dequantize_codes(torch.float64).T
    if low is not None and linear.proj_up is not None:
        acc = acc + low[:, :rank].double() @ linear.proj_up.double().T
    assert linear.bias is not None
    acc = acc + linear.bias.double()
    if residual is not None:
        acc = acc + residual.double()
    if epilogue == "swiglu":
        acc = F.silu(acc[:, 0::2]) * acc[:, 1::2]
    error = relative_error(y, acc)
    assert error < torch.finfo(HALF).eps / 2, f"tile {tile}, {m}x{n}x{k}: error {error:.2e}"
    return y


@pytest.mark.parametrize(("scale_type", "bits"), KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "epilogue"),
    [(1, 8, 64, 0, "plain"), (17, 200, 448, 16, "residual"), (133, 136, 128, 20, "swiglu")],
)
def test_every_tile_gives_the_same_bits(
    m: int, n: int, k: int, rank: int, epilogue: str, scale_type: str, bits: int
) -> None:
    found = [gemm(m, n, k, rank, scale_type, bits, tile, epilogue) for tile in TILES]
    for y in found[1:]:
        assert_same(y, found[0], f"{m}x{n}x{k}")


@pytest.mark.parametrize("tile", TILES)
def test_sums_over_all_of_k_are_exact(tile: int) -> None:
    """The sum is stored rounded, and then less that rounded value: 22 of its bits."""
    g = torch.Generator().manual_seed(7)
    n, k = 72, 704
    linear = linear_of(n, k, 0, "integer", g)
    linear.row_scales = torch.full((n,), 2.0**-12)  # type: ignore[misc]
    linear.bias = None  # type: ignore[misc]
    codes = torch.randint(-128, 128, (19, k), generator=g, dtype=torch.int8)
    codes[3], linear.qweight[5], linear.w_scales[5] = -128, 0x88, 16
    acts = mma_s8.pack_activations(codes, torch.ones(19, 1), 8)
    sums = ops.integer_sums_ref(codes, int4.widen(int4.unpack_nibbles(linear.qweight), linear.w_scales))
    assert sums.abs().max() == 128 * 128 * k
    wanted = sums.double() * 2.0**-12
    y = launch(linear, acts, None, 8, tile)
    assert_same(y, wanted.half(), "sums")
    rest = launch(linear, acts, None, 8, tile, "residual", -y)
    assert_same(rest, (wanted - y.double()).half(), "what rounding left")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", TILES)
def test_heads_in_the_epilogue(tile: int, head_dim: int) -> None:
    g = torch.Generator().manual_seed(head_dim)
    m, k, n = 21, 128, (HEADS + 2 * KV_HEADS) * head_dim
    linear = linear_of(n, k, 16, "integer", g)
    acts = mma_s8.pack_activations(torch.randint(-128, 128, (m, k), generator=g, dtype=torch.int8), torch.rand(m, 1), 8)
    low = torch.randn(m, 16, generator=g).half().float()
    cos, sin = ops.rope_tables(32, head_dim, 1e4)
    q, w = ((torch.rand(head_dim, generator=g) + 0.5).half() for _ in range(2))
    positions = torch.randint(0, 32, (m,), generator=g)
    heads = {
        "q_weight": address(q), "k_weight": address(w), "cos": address(cos), "sin": address(sin),
        "positions": address(positions), "table_rows": 32, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": head_dim,
    }  # fmt: skip
    found = launch(linear, acts, low, 8, tile, "qknorm_rope", heads=heads)
    wanted = launch(linear, acts, low, 8, tile)
    ops.qknorm_rope_ref(wanted, q, w, cos, sin, positions, HEADS, KV_HEADS, head_dim, 1e-6)
    assert_same(found[:, 2 * head_dim :], wanted[:, 2 * head_dim :], "values")
    assert relative_error(found, wanted) < 1e-4  # the order of a sum decides a rounding here and there
    assert (found != wanted).float().mean() < 0.02
