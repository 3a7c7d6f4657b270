"""Layer checks: the golden file, planted faults, and inputs captured where several linears read one tensor."""

import math
from pathlib import Path

import pytest
import torch
from random_linears import quantized
from safetensors.torch import load_file
from torch import nn

from omniw4.hadamard import hadamard64
from omniw4.tensors import LinearSpec, QuantizedLinear
from omniw4.verify.layers import capture_inputs, check_layer, evaluate_codes, rank_holding

GOLDEN = Path(__file__).parents[1] / "golden" / "linear.safetensors"


def path_of(linear, spoil=lambda y: y):
    """A stand-in for the op path: the sum in the input's own dtype, one rounding at the end, then ``spoil``."""
    return lambda x: spoil(evaluate_codes(x, linear, torch.float64).to(x.dtype))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("smooth", [0, 1])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_codes_evaluated_in_fp64_equal_the_golden_file(golden, rotation, smooth, bits):
    names = ("qweight", "w_scales", "proj_down", "proj_up", "bias")
    linear = QuantizedLinear(
        LinearSpec(act_bits=bits, rotation=rotation, smooth=bool(smooth)),
        smooth=golden["smooth"] if smooth else None,
        **{name: golden[name] for name in names},
    )
    y = evaluate_codes(golden["x"], linear, torch.float64)
    wanted = golden[f"{rotation}.smooth{smooth}.a{bits}.y"].double()
    assert (y - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("rank", [0, 16])
def test_a_faithful_op_path_passes(dtype, bits, rank):
    weight, linear = quantized(act_bits=bits, rank=rank)
    x = torch.randn(33, 128).to(dtype)
    check = check_layer("a.b", x, weight, None, linear, path_of(linear))
    assert check.op_passed
    assert check.tokens == 33
    assert check.op_error <= torch.finfo(dtype).eps
    assert check.sqnr_db == pytest.approx(-10 * math.log10(check.relative_error))


def test_relative_error_is_that_of_the_original_linear():
    """A linear that outputs zero has relative error 1 and 0 dB; one that is right has none."""
    weight, linear = quantized()
    x, bias = torch.randn(9, 128), torch.randn(24)
    zero = check_layer("p", x, weight, bias, linear, lambda x: torch.zeros(9, 24))
    assert zero.relative_error == 1.0
    assert zero.sqnr_db == 0.0
    right = check_layer("p", x, weight, bias, linear, lambda x: x.double() @ weight.double().T + bias.double())
    assert right.relative_error < 1e-28


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_op_path_four_times_worse_than_plain_torch_fails(dtype):
    weight, linear = quantized(n=64, k=256)
    x = torch.randn(64, 256).to(dtype)
    limit = check_layer("p", x, weight, None, linear, path_of(linear)).op_tolerance
    exact = evaluate_codes(x, linear, torch.float64)
    noise = torch.randn_like(exact)
    noise *= exact.norm() / noise.norm()
    for factor, passes in ((0.9, True), (1.1, False), (2.0, False)):
        path = lambda x, factor=factor: exact + factor * limit * noise  # noqa: E731
        assert check_layer("p", x, weight, None, linear, path).op_passed is passes


@pytest.mark.parametrize(
    "fault",
    [
        lambda y: y.index_fill(0, torch.tensor([3]), 0.0),  # a row of the tail not written
        lambda y: y.roll(1, dims=1),  # columns off by one
        lambda y: y * 1.01,  # a scale slightly wrong
        lambda y: y.index_fill(1, torch.tensor([0]), float("nan")),
    ],
)
def test_faults_of_a_kernel_fail(fault):
    weight, linear = quantized()
    x = torch.randn(17, 128).to(torch.float16)
    assert not check_layer("p", x, weight, None, linear, path_of(linear, fault)).op_passed


def test_an_output_that_is_zero_everywhere_is_no_division_by_zero():
    weight, linear = quantized(rank=0)
    check = check_layer("p", torch.zeros(4, 128), weight, None, linear, path_of(linear))
    assert check.op_passed
    assert check.relative_error == 0.0
    assert check.sqnr_db == math.inf


class Twins(nn.Module):
    """Two linears read one tensor, a third reads another, a fourth is never called."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.idle = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.c(self.a(x) + self.b(input=x))


def test_capture_keeps_the_first_tokens_and_shares_what_is_shared():
    model = Twins()
    batches = [torch.randn(2, 3, 8), torch.randn(1, 5, 8)]
    inputs = capture_inputs(model, ["a", "b", "c", "idle"], lambda: [model(x) for x in batches], tokens=8)
    wanted = torch.cat([x.reshape(-1, 8) for x in batches])[:8]
    assert torch.equal(inputs["a"], wanted)
    assert torch.equal(inputs["b"], wanted)
    assert inputs["c"].shape == (8, 8)
    assert not torch.equal(inputs["c"], wanted)
    assert "idle" not in inputs
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_one_forward_keeps_one_copy_of_a_shared_input():
    model = Twins()
    inputs = capture_inputs(model, ["a", "b"], lambda: model(torch.randn(4, 8)), tokens=64)
    assert inputs["a"] is inputs["b"]


def test_capture_removes_its_hooks_when_the_forward_fails():
    model = Twins()
    with pytest.raises(RuntimeError):
        capture_inputs(model, ["a"], lambda: model(torch.randn(4, 7)), tokens=64)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("n", "k"), [(24, 128), (160, 128)])
def test_the_rank_that_holds_the_error_is_that_of_its_spectrum(n, k):
    """An error made of three directions whose energies are 90, 8 and 2 % needs two of them for 95 %."""
    _, linear = quantized(n, k, rank=16)
    codes = linear.dequantize_codes()
    left, right = (torch.linalg.qr(torch.randn(size, 3))[0] for size in (n, k))
    error = left @ torch.diag(torch.tensor([90.0, 8.0, 2.0]).sqrt()) @ right.T
    weight = hadamard64(codes + error) if linear.spec.rotation == "hadamard64" else codes + error
    assert linear.smooth is None
    assert [rank_holding(share, weight, linear) for share in (0.5, 0.95, 0.99)] == [1, 2, 3]
    check = check_layer("p", torch.randn(4, k), weight, None, linear, path_of(linear), error_ranks=True)
    assert check.rank_95 == 2
