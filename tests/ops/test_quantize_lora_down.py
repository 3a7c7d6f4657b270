"""quantize_lora_down against a naive loop, at its edges, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import int4, ops
from omniw4.errors import LayoutError, OpError
from omniw4.ops.layouts import activation_shapes
from problems import assert_same, make_input, make_linear, relative_error
from shapes import Shape, ids, small

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def run(
    x: torch.Tensor, *, act_bits: int = 4, rotation: str = "hadamard64", clip: float = 1.0, **tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    names = ("proj_down", "inv_smooth", "inv_rms", "norm_weight")
    return ops.quantize_lora_down(x, *(tensors.get(name) for name in names), rotation, act_bits, clip, "canonical")[:3]


def sylvester() -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / 8


def naive_codes(group: list[float], clip: float, qmax: int) -> tuple[list[int], float]:
    """One group in scalar arithmetic with every rounding spelled out."""

    def f32(v: float) -> float:
        return torch.tensor(v, dtype=torch.float64).float().double().item()

    absmax = max(abs(v) for v in group)
    scale = 0.0 if absmax == 0 else min(max(f32(absmax * f32(clip / qmax)), 2.0**-14), 65504.0)
    scale = torch.tensor(scale).half().double().item()
    if scale == 0:
        return [0] * len(group), 0.0
    inverse = f32(1 / scale)
    return [min(max(round(f32(v * inverse)), -qmax - 1), qmax) for v in group], scale


@pytest.mark.parametrize("clip", [1.0, 0.95])
@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_equal_a_naive_loop(dtype: torch.dtype, act_bits: int, clip: float) -> None:
    x = make_input(6, 128, dtype)
    qact, scales, _ = run(x, act_bits=act_bits, rotation="none", clip=clip)
    codes = int4.unpack_nibbles(qact) if act_bits == 4 else qact
    width = 64 if act_bits == 4 else 128
    for m in range(6):
        for first in range(0, 128, width):
            expected, scale = naive_codes(x[m, first : first + width].tolist(), clip, 7 if act_bits == 4 else 127)
            assert codes[m, first : first + width].tolist() == expected, f"row {m}, column {first}"
            assert scales[m, first // width].item() == scale, f"row {m}, column {first}"


@pytest.mark.parametrize("shape", small(), ids=ids(small()))
def test_shapes_and_low_rank_product(shape: Shape) -> None:
    x, linear = make_input(shape.m, shape.k), make_linear(shape.n, shape.k, shape.r)
    tensors = {} if linear.proj_down is None else {"proj_down": linear.proj_down}
    for act_bits in (4, 8, 16):
        qact, scales, lora_act = run(x, act_bits=act_bits, **tensors)
        wanted = activation_shapes("canonical", shape.m, shape.k, act_bits, x.dtype)
        assert tuple(qact.shape) == wanted.qact
        assert qact.dtype == wanted.qact_dtype
        assert tuple(scales.shape) == wanted.a_scales
        assert (tuple(lora_act.shape), lora_act.dtype) == ((shape.m, shape.r), torch.float32)
    if linear.proj_down is not None:
        rotated = (x.double().reshape(shape.m, -1, 64) @ sylvester()).reshape(x.shape)
        assert relative_error(lora_act, rotated @ linear.proj_down.double()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_norm_smooth_and_rotation(dtype: torch.dtype) -> None:
    """The fused form equals its steps done one by one, with the roundings of transformers' RMSNorm."""
    x = make_input(9, 192, dtype)
    weight = (torch.rand(192) + 0.5).to(dtype)
    inv_smooth = (torch.rand(192) + 0.5).reciprocal()
    inv = ops.inv_rms(x, 1e-6)
    normed = weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    by_steps = (normed.float() * inv_smooth).reshape(9, 3, 64).double() @ sylvester()
    fused = ops.transform(x, inv_smooth, inv, weight, "hadamard64")
    assert relative_error(fused, by_steps.reshape(9, 192)) < 1e-6
    # not rotated, every operation is elementwise, so the bits must agree
    assert_same(ops.transform(x, inv_smooth, inv, weight, "none"), normed.float() * inv_smooth, "transform")


def test_sixteen_bits_pass_through() -> None:
    x = make_input(5, 64, torch.bfloat16)
    qact, scales, _ = run(x, act_bits=16, rotation="none")
    assert_same(qact, x, "qact")
    assert qact.data_ptr() != x.data_ptr()
    assert scales.shape == (5, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_bad_token_stays_in_its_row(act_bits: int, bad: float) -> None:
    x, linear = make_input(70, 192), make_linear(24, 192)
    clean = run(x, act_bits=act_bits, proj_down=linear.proj_down)
    x[5, 70] = bad
    dirty = run(x, act_bits=act_bits, proj_down=linear.proj_down)
    others = torch.arange(70) != 5
    for name, a, b in zip(("qact", "a_scales", "lora_act"), dirty, clean, strict=True):
        assert_same(a[others], b[others], name)
    carrier = dirty[0] if act_bits == 16 else dirty[1]
    assert not carrier[5].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_row_is_the_same_alone(act_bits: int, dtype: torch.dtype) -> None:
    x, linear = make_input(131, 320, dtype), make_linear(24, 320, 33)
    weight = (torch.rand(320) + 0.5).to(dtype)
    tensors = {"proj_down": linear.proj_down, "norm_weight": weight}
    batched = run(x, act_bits=act_bits, inv_rms=ops.inv_rms(x, 1e-6), **tensors)
    for m in (0, 1, 2, 63, 64, 130):
        alone = run(x[m : m + 1], act_bits=act_bits, inv_rms=ops.inv_rms(x[m : m + 1], 1e-6), **tensors)
        for name, a, b in zip(("qact", "a_scales", "lora_act"), alone, batched, strict=True):
            assert_same(a[0], b[m], f"{name}, row {m}")


def test_zero_rows_and_no_rows() -> None:
    proj_down = make_linear(8, 64).proj_down
    for act_bits in (4, 8, 16):
        qact, scales, lora_act = run(torch.zeros(3, 64), act_bits=act_bits, proj_down=proj_down)
        for tensor in (qact, scales, lora_act):
            assert not tensor.any()
        qact, scales, lora_act = run(torch.zeros(0, 64), act_bits=act_bits, proj_down=proj_down)
        assert (qact.shape[0], scales.shape[0], lora_act.shape) == (0, 0, (0, 16))


def test_strides_do_not_matter() -> None:
    wide = make_input(20, 256)
    proj_down = make_linear(8, 128).proj_down
    for view in (wide[::2, 64:192], wide[:, ::2], wide[:, :128].T.contiguous().T):
        for a, b in zip(run(view, proj_down=proj_down), run(view.contiguous(), proj_down=proj_down), strict=True):
            assert_same(a, b, "strided")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 96)}, "96 columns, wanted a multiple of 64"),
        ({"x": torch.zeros(2, 0)}, "0 columns"),
        ({"x": torch.zeros(2, 64, 64)}, "3 dimensions"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x has dtype float64"),
        ({"x": torch.zeros(2, 64, dtype=torch.int8)}, "x has dtype int8"),
        ({"proj_down": torch.zeros(128, 16)}, r"proj_down has shape \[128, 16\], wanted \[64, 16\]"),
        ({"proj_down": torch.zeros(64)}, r"proj_down has shape \[64\]"),
        ({"inv_smooth": torch.zeros(64).half()}, "inv_smooth has dtype float16, wanted float32"),
        ({"inv_smooth": torch.zeros(65)}, r"inv_smooth has shape \[65\]"),
        ({"inv_rms": torch.zeros(2)}, "inv_rms needs a norm_weight"),
        ({"inv_rms": torch.zeros(3), "norm_weight": torch.zeros(64)}, r"inv_rms has shape \[3\], wanted \[2\]"),
        ({"inv_rms": torch.zeros(2), "norm_weight": torch.zeros(64).half()}, "norm_weight has dtype float16"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"act_bits": 5}, "act_bits is 5"),
        ({"clip": 0.0}, "act_clip is 0"),
    ],
)
def test_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(2, 64), **change}
    with pytest.raises(OpError, match=f"quantize_lora_down: .*{message}"):
        run(**arguments)  # type: ignore[arg-type]


def test_tensors_of_two_devices_are_refused() -> None:
    """Called as the implementations call it: the dispatcher itself sends anything with a meta tensor to the fake."""
    elsewhere = torch.zeros(64, 16, device="meta")
    with pytest.raises(OpError, match="proj_down is on meta, the input is on cpu"):
        ops.quantize_lora_down_ref(torch.zeros(2, 64), elsewhere, None, None, None, "none", 4, 1.0)


def test_reference_refuses_kernel_layouts() -> None:
    with pytest.raises(OpError, match="layout 'canonical' only, found 'mma_s4'"):
        ops.quantize_lora_down(torch.zeros(2, 64), None, None, None, None, "none", 4, 1.0, "mma_s4")
    with pytest.raises(LayoutError, match="'mma_s4' for 8-bit"):
        activation_shapes("mma_s4", 2, 64, 8, torch.float16)


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_registration(act_bits: int) -> None:
    x, linear = make_input(5, 128), make_linear(8, 128)
    arguments = (x, linear.proj_down, torch.rand(128), ops.inv_rms(x, 1e-6), torch.rand(128).half())
    torch.library.opcheck(ops.quantize_lora_down, (*arguments, "hadamard64", act_bits, 0.95, "canonical"))
    torch.library.opcheck(ops.quantize_lora_down, (x, None, None, None, None, "none", act_bits, 1.0, "canonical"))
