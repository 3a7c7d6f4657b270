"""W4A4Linear as a drop-in for nn.Linear."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from omniw4.errors import LayoutError, OpError
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_input, make_linear, relative_error

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def module(act_bits: int = 4, **options: object) -> W4A4Linear:
    return W4A4Linear.from_quantized(make_linear(72, 192, act_bits=act_bits, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("act_bits", [4, 8, 16])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
def test_golden(rotation: str, smooth: bool, act_bits: int) -> None:
    golden = load_file(GOLDEN)
    spec = LinearSpec(act_bits=act_bits, rotation=rotation, smooth=smooth)  # type: ignore[arg-type]
    names = ("qweight", "w_scales", "proj_down", "proj_up", "bias", *(["smooth"] if smooth else []))
    linear = W4A4Linear(QuantizedLinear(spec, **{name: golden[name] for name in names}))
    y = golden[f"{rotation}.smooth{int(smooth)}.a{act_bits}.y"]
    assert relative_error(linear(golden["x"]), y) < 1e-3
    assert relative_error(linear(golden["x"].float()), y) < 1e-6


@pytest.mark.parametrize("act_bits", [8, 16])
@pytest.mark.parametrize("smooth", [False, True])
def test_close_to_the_linear_it_stands_for(act_bits: int, smooth: bool) -> None:
    linear = module(act_bits, smooth=smooth)
    x = torch.randn(50, 192)
    dense = x.double() @ linear.quantized().dequantize(torch.float64).T + linear.bias.double()
    assert relative_error(linear(x), dense) < (0.02 if act_bits == 8 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_any_leading_dimensions(act_bits: int, dtype: torch.dtype) -> None:
    linear = module(act_bits)
    x = make_input(24, 192, dtype)
    flat = linear(x)
    assert (flat.shape, flat.dtype) == ((24, 72), dtype)
    for shape in ((2, 3, 4), (24, 1), (1, 24), (1, 2, 3, 4)):
        y = linear(x.reshape(*shape, 192))
        assert_same(y.reshape(24, 72), flat, str(shape))
        assert y.shape == (*shape, 72)
    assert_same(linear(x[3]), flat[3], "one token without a batch")
    for shape in ((0,), (2, 0, 3)):
        assert linear(x.new_zeros(*shape, 192)).shape == (*shape, 72)


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_views_give_what_contiguous_tensors_give(act_bits: int) -> None:
    linear = module(act_bits)
    wide = make_input(40, 400)
    for view in (
        wide[::3, 5:197],
        wide[:, ::2][:, :192],
        wide.T[:192].T,
        wide[:20, :192].reshape(4, 5, 192).transpose(0, 1),
        wide[:1, :192].expand(7, 192),
    ):
        assert_same(linear(view), linear(view.contiguous()), str(view.stride()))


@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_batched_row_equals_the_row_alone(act_bits: int) -> None:
    linear = module(act_bits)
    x = make_input(130, 192)
    batched = linear(x)
    for row in (0, 1, 2, 63, 64, 129):
        assert_same(linear(x[row]), batched[row], f"row {row}")
    padded = torch.cat((x, torch.full((9, 192), float("nan")).half(), torch.zeros(5, 192).half()))
    assert_same(linear(padded)[:130], batched, "beside NaN and zero rows")


def test_state_dict_is_the_checkpoint() -> None:
    linear = make_linear(72, 192, smooth=True)
    parent = nn.Sequential(nn.Identity(), W4A4Linear(linear))
    state = parent.state_dict()
    assert {*state} == {f"1.{name}" for name in ("qweight", "w_scales", "proj_down", "proj_up", "smooth", "bias")}
    for name, tensor in linear.tensors().items():
        assert_same(state[f"1.{name}"], tensor, name)
    assert {*W4A4Linear(make_linear(8, 64, 0, bias=False)).state_dict()} == {"qweight", "w_scales"}
    other = nn.Sequential(nn.Identity(), W4A4Linear(make_linear(72, 192, smooth=True, seed=5)))
    other.load_state_dict(state)
    x = make_input(5, 192)
    assert_same(other(x), parent(x), "after load_state_dict")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_dtype_changes_of_a_model_leave_it_alone(stored: torch.dtype, dtype: torch.dtype) -> None:
    linear = make_linear(72, 192, smooth=True, dtype=stored)
    linear.w_scales[0, 0] = 6e4  # more than bfloat16 resolves, and near the end of float16
    tensors = {name: tensor.clone() for name, tensor in linear.tensors().items()}
    model = nn.Sequential(nn.LayerNorm(192), W4A4Linear(linear))
    casts = {torch.float16: model.half, torch.bfloat16: model.bfloat16, torch.float32: model.float}
    for change in (casts[dtype], lambda: model.to(dtype), lambda: model.type(dtype), lambda: model.to("cpu", dtype)):
        change()
        assert model[0].weight.dtype == dtype
        for name, tensor in tensors.items():
            assert_same(getattr(model[1], name), tensor, name)
    assert model(make_input(4, 192, dtype)).dtype == dtype


def test_moves_to_other_devices() -> None:
    linear = module(smooth=True)
    assert {tensor.device.type for tensor in linear.to("meta", torch.bfloat16).buffers()} == {"meta"}
    assert linear.w_scales.dtype == torch.float16
    linear.to_empty(device="cpu").load_state_dict(module(smooth=True).state_dict())
    x = make_input(3, 192)
    assert_same(linear(x), module(smooth=True)(x), "through meta")


def test_copies_are_independent_and_equal() -> None:
    linear = module(smooth=True)
    x = make_input(5, 192)
    buffer = io.BytesIO()
    torch.save(linear, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear)), torch.load(buffer, weights_only=False)):
        assert other.spec == linear.spec
        assert_same(other(x), linear(x), "copy")
        other.qweight.zero_()
        assert linear.qweight.any()


def test_nothing_is_trainable_and_a_backward_pass_raises() -> None:
    linear = module()
    assert not list(linear.parameters())
    x = make_input(3, 192, torch.float32).requires_grad_()
    y = linear(x)
    with pytest.raises(RuntimeError, match="omniw4"):
        y.sum().backward()
    with torch.no_grad():
        assert not linear(x).requires_grad


def test_repr_says_what_it_is() -> None:
    assert repr(module(8)) == (
        "W4A4Linear(in_features=192, out_features=72, bias=True, w4a8, rank=16, rotation=hadamard64, "
        "scales=float16, layout=canonical)"
    )


@pytest.mark.parametrize("x", [torch.zeros(3, 191), torch.zeros(192, 3), torch.zeros(3, 192, 1)])
def test_wrong_width_is_named(x: torch.Tensor) -> None:
    with pytest.raises(OpError, match=r"W4A4Linear\(192, 72\) got an input of shape"):
        module()(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8])
def test_wrong_dtype_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(OpError, match=f"x has dtype {str(dtype).removeprefix('torch.')}"):
        module()(torch.zeros(3, 192, dtype=dtype))


@pytest.mark.parametrize(
    ("act_bits", "backend"), [(4, "eager"), (4, "aot_eager"), (8, "aot_eager"), (16, "aot_eager"), (4, "inductor")]
)
def test_compiles_into_one_graph(act_bits: int, backend: str) -> None:
    torch._dynamo.reset()
    layers = (module(act_bits, smooth=True), nn.Linear(72, 64), nn.SiLU(), W4A4Linear(make_linear(16, 64, seed=3)))
    model = nn.Sequential(*layers).half()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 5, 192), (3, 7, 192), (2, 1, 192)):
            x = make_input(shape[0] * shape[1], 192).reshape(shape)
            # between the linears inductor may fuse and round otherwise, so it is only close
            if backend == "inductor":
                assert relative_error(compiled(x), model(x)) < 5e-3
            else:
                assert_same(compiled(x), model(x), str(shape))


def test_prepare_packs_and_goes_back() -> None:
    linear = module(smooth=True)
    x = make_input(4, 192)
    before = linear(x)
    linear.prepare("mma_s4", dtype=torch.bfloat16)
    assert linear.layout == "mma_s4"
    assert linear.get_buffer("packed_proj_up").dtype == torch.bfloat16
    assert_same(linear.get_buffer("packed_inv_smooth"), linear.smooth.float().reciprocal(), "inv_smooth")
    assert linear.qweight is None
    assert linear.w_scales is None
    fresh = module(smooth=True)
    assert {*linear.state_dict()} == {*fresh.state_dict()}
    for name, tensor in fresh.state_dict().items():
        assert_same(linear.state_dict()[name], tensor, f"{name} in state_dict while packed")
        assert_same(linear.quantized().tensors()[name], tensor, f"{name} of quantized() while packed")
    with pytest.raises(OpError, match="layout 'canonical' only, found 'mma_s4'"):
        linear(x)  # on a CPU there are no kernels
    linear.load_state_dict(module(smooth=True, seed=9).state_dict())
    fresh = module(smooth=True, seed=9)
    fresh.prepare("mma_s4")
    assert_same(linear.get_buffer("packed_qweight"), fresh.get_buffer("packed_qweight"), "packed after a load")
    linear.load_state_dict(module(smooth=True).state_dict())
    linear.prepare()
    assert linear.layout == "canonical"
    assert not [name for name, _ in linear.named_buffers() if name.startswith("packed")]
    assert_same(linear(x), before, "back to the reference")


@pytest.mark.parametrize("layout", ["mma_s4", "mma_s8", "wgmma_s8"])
def test_codes_are_in_memory_once(layout: str) -> None:
    linear = module()
    held = linear.get_buffer("qweight").numel() + linear.get_buffer("w_scales").numel() * 2
    linear.prepare(layout)
    large = [b for name, b in linear.named_buffers() if name.endswith(("qweight", "w_scales"))]
    padded = sum(b.numel() * b.element_size() for b in large)
    assert padded < 2 * held  # rows up to the tile of the family
    moved = copy.deepcopy(linear).to("meta")
    assert {b.device.type for b in moved.buffers()} == {"meta"}
    assert linear.half().layout == layout


def test_prepare_refuses_what_does_not_fit() -> None:
    with pytest.raises(LayoutError, match="no layout 'mma_s2'"):
        module().prepare("mma_s2")
    linear = module(8)
    with pytest.raises(LayoutError, match="layout 'mma_s4' cannot run this linear"):
        linear.prepare("mma_s4")
    assert linear.layout == "canonical"
