"""The ops with integer group scales: exact sums, FP64, and their promises about rows, zeros and NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omniw4 import int4, ops
from omniw4.errors import LayoutError, OpError
from omniw4.tensors import QuantizedLinear
from problems import assert_same, make_input, make_linear, relative_error
from shapes import Shape, ids, small

Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def make_integer_linear(n: int, k: int, rank: int = 16, *, act_bits: int = 4, bias: bool = True) -> QuantizedLinear:
    linear = make_linear(n, k, rank, act_bits=act_bits, bias=bias)
    g = torch.Generator().manual_seed(n + k)
    return replace(
        linear,
        spec=replace(linear.spec, scale_type="integer"),
        w_scales=torch.randint(1, 17, (n, k // 64), generator=g, dtype=torch.uint8),
        row_scales=(torch.rand(n, generator=g) + 0.5) * 1e-3,
    )


def quantize(x: torch.Tensor, linear: QuantizedLinear) -> Activations:
    spec = linear.spec
    return ops.quantize_lora_down(
        x, linear.proj_down, None, None, None, spec.rotation, spec.act_bits, spec.act_clip, "canonical", "integer"
    )


def run(acts: Activations, linear: QuantizedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    qact, a_scales, lora_act, token_scales = acts
    return ops.gemm_lora_up(
        qact, a_scales, linear.qweight, linear.w_scales, lora_act if linear.spec.rank else None, linear.proj_up,
        linear.bias, None, qact.shape[0], linear.out_features, linear.spec.act_bits, "plain", dtype, "canonical",
        linear.row_scales, token_scales,
    )  # fmt: skip


def exact(acts: Activations, linear: QuantizedLinear) -> torch.Tensor:
    """The contract in FP64 over dequantized operands."""
    qact, a_scales, lora_act, token_scales = acts
    if linear.spec.act_bits == 4:
        left = int4.dequantize_integer(int4.unpack_nibbles(qact), a_scales, token_scales[:, None], torch.float64)
    else:
        left = qact.double() if linear.spec.act_bits == 16 else int4.dequantize(qact, a_scales, torch.float64)
    y = left @ linear.dequantize_codes(torch.float64).T
    if linear.proj_up is not None:
        y = y + lora_act.double() @ linear.proj_up.double().T
    return y if linear.bias is None else y + linear.bias.double()


@pytest.mark.parametrize("act_bits", [4, 8, 16])
@pytest.mark.parametrize("shape", small(), ids=ids(small()))
def test_against_fp64(shape: Shape, act_bits: int) -> None:
    linear = make_integer_linear(shape.n, shape.k, shape.r, act_bits=act_bits)
    acts = quantize(make_input(shape.m, shape.k), linear)
    assert relative_error(run(acts, linear), exact(acts, linear)) < 1e-6


def test_the_quantizer_follows_int4() -> None:
    x = make_input(9, 192)
    qact, a_scales, _, token_scales = ops.quantize_lora_down(
        x, None, None, None, None, "hadamard64", 4, 0.95, "canonical", "integer"
    )
    codes, scales, token = int4.quantize_groups_integer(ops.transform(x, None, None, None, "hadamard64"), 0.95)
    assert_same(int4.unpack_nibbles(qact), codes, "codes")
    assert_same(a_scales, scales, "a_scales")
    assert_same(token_scales, token[:, 0], "token_scales")


@pytest.mark.parametrize("act_bits", [8, 16])
def test_eight_and_sixteen_bits_know_no_scale_type(act_bits: int) -> None:
    x = make_input(9, 192)
    arguments = (x, None, None, None, None, "hadamard64", act_bits, 0.95, "canonical")
    for found, wanted in zip(
        ops.quantize_lora_down(*arguments, "integer"), ops.quantize_lora_down(*arguments), strict=True
    ):
        assert_same(found, wanted, "activations")
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("k", [64, 1024, 1088, 4096])
def test_sums_are_exact_to_the_last_bit(k: int) -> None:
    """The largest sums there are, and random ones, against INT64."""
    g = torch.Generator().manual_seed(k)
    a = torch.randint(-128, 128, (5, k), generator=g, dtype=torch.int8)
    w = torch.randint(-128, 128, (7, k), generator=g, dtype=torch.int8)
    a[0], w[0], w[1] = -128, -128, 127
    wanted = a.long() @ w.long().T
    assert wanted.abs().max() == 128 * 128 * k
    sums = ops.integer_sums_ref(a, w)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.long(), wanted)


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_row_is_the_same_alone_and_anywhere(act_bits: int) -> None:
    linear = make_integer_linear(200, 1088, 24, act_bits=act_bits)
    acts = quantize(make_input(131, 1088), linear)
    batched = run(acts, linear)
    for row in (0, 1, 64, 130):
        alone = run(tuple(t[row : row + 1] for t in acts), linear)  # type: ignore[arg-type]
        assert_same(alone[0], batched[row], f"row {row}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tokens_rows_and_groups_contribute_exactly_zero(dtype: torch.dtype) -> None:
    linear = make_integer_linear(16, 128, 0, bias=False)
    linear.w_scales[3] = 0
    x = make_input(4, 128, dtype)
    x[0] = 0
    y = run(quantize(x, linear), linear, dtype)
    assert not y[:, 3].any()
    assert not y[0].any()
    assert y.isfinite().all()
    assert y[2].count_nonzero() == 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_bad_token_makes_its_row_nan_and_no_other(act_bits: int, bad: float) -> None:
    linear = make_integer_linear(24, 192, act_bits=act_bits)
    x = make_input(70, 192)
    clean = run(quantize(x, linear), linear)
    x[64, 100] = bad
    dirty = run(quantize(x, linear), linear)
    others = torch.arange(70) != 64
    assert_same(dirty[others], clean[others], "other rows")
    assert dirty[64].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_scales": None}, "a_scales has dtype uint8, wanted float16"),
        ({"token_scales": None}, r"token_scales has shape \[0\], wanted \[4\]"),
        ({"token_scales": torch.zeros(5)}, r"token_scales has shape \[5\], wanted \[4\]"),
        ({"token_scales": torch.zeros(4).half()}, "token_scales has dtype float16, wanted float32"),
        ({"row_scales": torch.zeros(23)}, r"row_scales has shape \[23\], wanted \[24\]"),
        ({"row_scales": torch.zeros(24).half()}, "row_scales has dtype float16, wanted float32"),
        ({"w_scales": torch.zeros(24, 2).half()}, "w_scales has dtype float16, wanted uint8"),
        ({"a_scales": torch.zeros(4, 2).half()}, "a_scales has dtype float16, wanted uint8"),
    ],
)
def test_refused_by_name(change: dict[str, object], message: str) -> None:
    linear = make_integer_linear(24, 128, 0, bias=False)
    qact, a_scales, _, token_scales = quantize(make_input(4, 128), linear)
    arguments = {
        "qact": qact, "a_scales": a_scales, "qweight": linear.qweight, "w_scales": linear.w_scales, "lora_act": None,
        "proj_up": None, "bias": None, "residual": None, "tokens": 4, "out_features": 24, "act_bits": 4,
        "epilogue": "plain", "dtype": torch.float16, "layout": "canonical", "row_scales": linear.row_scales,
        "token_scales": token_scales,
    }  # fmt: skip
    assert ops.gemm_lora_up(**arguments).shape == (4, 24)
    with pytest.raises(OpError, match=f"gemm_lora_up: {message}"):
        ops.gemm_lora_up(**{**arguments, **change})


def test_an_unknown_scale_type_is_named() -> None:
    with pytest.raises(OpError, match="scale_type is 'int', wanted 'float16' or 'integer'"):
        ops.quantize_lora_down(torch.zeros(2, 64), None, None, None, None, "none", 4, 1.0, "canonical", "int")


def test_a_layout_without_integer_scales_says_so() -> None:
    with pytest.raises(LayoutError, match="layout 'mma_s4' does not hold activations with integer group scales") as e:
        ops.activation_shapes("mma_s4", 2, 64, 4, torch.float16, "integer")
    assert "'mma_s8'" in e.value.hint
    for layout in ("mma_s8", "wgmma_s8"):
        eight = ops.activation_shapes(layout, 2, 64, 8, torch.float16)
        assert ops.activation_shapes(layout, 2, 64, 4, torch.float16, "integer") == eight


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_registration(act_bits: int) -> None:
    linear = make_integer_linear(24, 128, act_bits=act_bits)
    x = make_input(4, 128)
    arguments = (x, linear.proj_down, None, None, None, "hadamard64", act_bits, 0.95, "canonical", "integer")
    torch.library.opcheck(ops.quantize_lora_down, arguments)
    qact, a_scales, lora_act, token_scales = quantize(x, linear)
    torch.library.opcheck(
        ops.gemm_lora_up,
        (qact, a_scales, linear.qweight, linear.w_scales, lora_act, linear.proj_up, linear.bias, None, 4, 24, act_bits,
         "plain", torch.float16, "canonical", linear.row_scales, token_scales),
    )  # fmt: skip


def test_the_heads_epilogue_takes_integer_scales_too() -> None:
    linear = make_integer_linear(4 * 64, 128, 0, bias=False)
    qact, a_scales, _, token_scales = quantize(make_input(5, 128), linear)
    cos, sin = ops.rope_tables(8, 64, 1e4)
    positions = torch.arange(5)
    fused = ops.gemm_qknorm_rope(
        qact, a_scales, linear.qweight, linear.w_scales, None, None, None, None, None, cos, sin, positions, 2, 1, 64,
        1e-6, 5, 4, torch.float32, "canonical", linear.row_scales, token_scales,
    )  # fmt: skip
    apart = run((qact, a_scales, torch.empty(5, 0), token_scales), linear)
    ops.qknorm_rope(apart, None, None, cos, sin, positions, 2, 1, 64, 1e-6)
    assert_same(fused, apart, "qkv")
