"""gemm_lora_up against FP64 and a naive loop, its epilogues, and its promises about rows and zero scales."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omniw4 import int4, ops
from omniw4.errors import OpError
from omniw4.tensors import QuantizedLinear
from problems import assert_same, for_shape, make_input, make_linear, relative_error
from shapes import Shape, ids, small

Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, linear: QuantizedLinear) -> Activations:
    spec = linear.spec
    return ops.quantize_lora_down(
        x, linear.proj_down, None, None, None, spec.rotation, spec.act_bits, spec.act_clip, "canonical"
    )[:3]


def run(
    acts: Activations,
    linear: QuantizedLinear,
    *,
    epilogue: str = "plain",
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    qact, a_scales, lora_act = acts
    return ops.gemm_lora_up(
        qact, a_scales, linear.qweight, linear.w_scales, lora_act if linear.spec.rank else None, linear.proj_up,
        linear.bias, residual, qact.shape[0], linear.out_features, linear.spec.act_bits, epilogue, dtype, "canonical",
    )  # fmt: skip


def exact(acts: Activations, linear: QuantizedLinear) -> torch.Tensor:
    """The formula of the contract in FP64, written from the integer group sums."""
    qact, a_scales, lora_act = acts
    weights = int4.unpack_nibbles(linear.qweight)
    if linear.spec.act_bits == 16:
        y = qact.double() @ int4.dequantize(weights, linear.w_scales, torch.float64).T
    else:
        codes = int4.unpack_nibbles(qact) if linear.spec.act_bits == 4 else qact
        sums = ops.group_sums_ref(codes, weights).double()  # [M, N, K/64]
        y = (sums * a_scales.double()[:, None] * linear.w_scales.double()[None]).sum(-1)
    if linear.proj_up is not None:
        y = y + lora_act.double() @ linear.proj_up.double().T
    return y if linear.bias is None else y + linear.bias.double()


@pytest.mark.parametrize("act_bits", [4, 8, 16])
@pytest.mark.parametrize("shape", small(), ids=ids(small()))
def test_against_fp64(shape: Shape, act_bits: int) -> None:
    x, linear = for_shape(shape, act_bits=act_bits)
    acts = quantize(x, linear)
    y = run(acts, linear)
    assert y.shape == (shape.m, shape.n)
    assert relative_error(y, exact(acts, linear)) < 1e-6


def test_group_sums_equal_a_naive_loop() -> None:
    g = torch.Generator().manual_seed(0)
    for low, high in ((-8, 8), (-128, 128)):
        a = torch.randint(low, high, (3, 128), generator=g, dtype=torch.int8)
        w = torch.randint(-8, 8, (4, 128), generator=g, dtype=torch.int8)
        a[0], w[0] = low, -8  # the largest sum there is
        sums = ops.group_sums_ref(a, w)
        for m in range(3):
            for n in range(4):
                for group in range(2):
                    span = slice(64 * group, 64 * group + 64)
                    naive = sum(p * q for p, q in zip(a[m, span].tolist(), w[n, span].tolist(), strict=True))
                    assert sums[m, n, group].item() == naive, (m, n, group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_sixteen_bit_output_is_one_rounding(dtype: torch.dtype, act_bits: int) -> None:
    """At most twice the error that plain torch makes in that dtype over the same dequantized operands."""
    x, linear = make_input(33, 512, dtype), make_linear(72, 512, act_bits=act_bits, dtype=dtype)
    acts = quantize(x, linear)
    truth = exact(acts, linear)
    y = run(acts, linear, dtype=dtype)
    qact, a_scales, lora_act = acts
    left = qact if act_bits == 16 else int4.dequantize(int4.unpack_nibbles(qact) if act_bits == 4 else qact, a_scales)
    weight = int4.dequantize(int4.unpack_nibbles(linear.qweight), linear.w_scales)
    assert linear.proj_up is not None
    plain = left.to(dtype) @ weight.to(dtype).T + lora_act.to(dtype) @ linear.proj_up.T + linear.bias
    assert y.dtype == dtype
    assert relative_error(y, truth) <= 2 * relative_error(plain, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_epilogues(dtype: torch.dtype) -> None:
    linear = make_linear(48, 128)
    acts = quantize(make_input(21, 128), linear)
    acc = run(acts, linear)
    residual = torch.randn(21, 48).to(dtype)
    added = run(acts, linear, epilogue="residual", residual=residual, dtype=dtype)
    assert_same(added, (acc + residual.float()).to(dtype), "residual")
    gated = run(acts, linear, epilogue="swiglu", dtype=dtype)
    assert gated.shape == (21, 24)
    wanted = F.silu(acc[:, 0::2].double()) * acc[:, 1::2].double()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert relative_error(gated, wanted) < tolerance


def test_packed_low_rank_activations_are_taken_too() -> None:
    linear = make_linear(40, 128, rank=24)
    qact, a_scales, lora_act = quantize(make_input(19, 128), linear)
    packed = ops.pack_lora_act(lora_act, torch.float16)
    y = run((qact, a_scales, packed), linear)
    assert_same(y, run((qact, a_scales, lora_act.half().float()), linear), "packed lora_act")


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("epilogue", ["plain", "swiglu"])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_row_is_the_same_alone_and_anywhere(act_bits: int, epilogue: str, threads: int) -> None:
    linear = make_linear(200, 448, 24, act_bits=act_bits)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m in (2, 7, 64, 65, 300):
            acts = quantize(make_input(m, 448), linear)
            batched = run(acts, linear, epilogue=epilogue)
            for row in {0, 1, m // 2, m - 1}:
                alone = run(tuple(t[row : row + 1] for t in acts), linear, epilogue=epilogue)  # type: ignore[arg-type]
                assert_same(alone[0], batched[row], f"row {row} of {m}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("act_bits", [4, 8])
def test_zero_scales_contribute_exactly_zero(act_bits: int) -> None:
    linear = make_linear(16, 128, rank=0, bias=False, act_bits=act_bits)
    qact, a_scales, lora_act = quantize(make_input(4, 128), linear)
    linear.w_scales[3] = 0
    a_scales[0] = 0
    y = run((qact, a_scales, lora_act), linear)
    assert not y[:, 3].any()
    assert not y[0].any()
    assert y[1:].isfinite().all()
    assert y[2].count_nonzero() == 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_bad_token_makes_its_row_nan_and_no_other(act_bits: int, bad: float) -> None:
    linear = make_linear(24, 192, act_bits=act_bits)
    x = make_input(70, 192)
    clean = run(quantize(x, linear), linear)
    x[64, 100] = bad
    dirty = run(quantize(x, linear), linear)
    others = torch.arange(70) != 64
    assert_same(dirty[others], clean[others], "other rows")
    assert dirty[64].isnan().all()


def test_no_rows() -> None:
    linear = make_linear(24, 64)
    assert run(quantize(torch.zeros(0, 64), linear), linear, dtype=torch.float16).shape == (0, 24)


def arguments() -> dict[str, object]:
    linear = make_linear(24, 128)
    qact, a_scales, lora_act = quantize(make_input(4, 128), linear)
    return {
        "qact": qact, "a_scales": a_scales, "qweight": linear.qweight, "w_scales": linear.w_scales,
        "lora_act": lora_act, "proj_up": linear.proj_up, "bias": linear.bias, "residual": None, "tokens": 4,
        "out_features": 24, "act_bits": 4, "epilogue": "plain", "dtype": torch.float16, "layout": "canonical",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qact": torch.zeros(4, 32, dtype=torch.uint8)}, r"qact has shape \[4, 32\], wanted \[4, 64\]"),
        ({"qact": torch.zeros(4, 64, dtype=torch.int8)}, "qact has dtype int8, wanted uint8"),
        ({"a_scales": torch.zeros(4, 2)}, "a_scales has dtype float32"),
        ({"a_scales": torch.zeros(4, 1).half()}, r"a_scales has shape \[4, 1\], wanted \[4, 2\]"),
        ({"qweight": torch.zeros(24, 64, dtype=torch.int8)}, "qweight has dtype int8, wanted uint8"),
        ({"qweight": torch.zeros(24, 48, dtype=torch.uint8)}, "K = 96"),
        ({"out_features": 23}, "wanted"),
        ({"tokens": 5}, "lora_act has shape"),
        ({"w_scales": torch.zeros(24, 2).bfloat16()}, "w_scales has dtype bfloat16"),
        ({"lora_act": None}, "come together"),
        ({"lora_act": torch.zeros(4, 16).half()}, "lora_act has dtype float16, wanted float32"),
        ({"lora_act": torch.zeros(4, 15)}, r"lora_act has shape \[4, 15\], wanted \[4, 16\]"),
        ({"bias": torch.zeros(23)}, r"bias has shape \[23\], wanted \[24\]"),
        ({"residual": torch.zeros(4, 24).half()}, "epilogue 'residual' only"),
        ({"epilogue": "residual"}, "epilogue 'residual' only"),
        ({"epilogue": "residual", "residual": torch.zeros(4, 24)}, "residual has dtype float32, wanted float16"),
        ({"epilogue": "gelu"}, "epilogue is 'gelu'"),
        ({"act_bits": 2}, "act_bits is 2"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"layout": "wgmma_s8"}, "found 'wgmma_s8'"),
    ],
)
def test_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(OpError, match=f"gemm_lora_up: .*{message}"):
        ops.gemm_lora_up(**{**arguments(), **change})


def test_swiglu_needs_even_width() -> None:
    linear = make_linear(23, 64, rank=0, bias=False)
    with pytest.raises(OpError, match="swiglu needs even N, found 23"):
        run(quantize(make_input(2, 64), linear), linear, epilogue="swiglu")


@pytest.mark.parametrize("epilogue", ["plain", "residual", "swiglu"])
def test_registration(epilogue: str) -> None:
    changed = {"epilogue": epilogue, "residual": torch.zeros(4, 24).half() if epilogue == "residual" else None}
    torch.library.opcheck(ops.gemm_lora_up, (), {**arguments(), **changed})
