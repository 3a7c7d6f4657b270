"""Linears of family wgmma_s8 on a GPU: determinism, graphs, and kernels that start before the one ahead is done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, input_on_gpu
from safetensors.torch import load_file
from wgmma_cases import ACT_BITS, DTYPES, LAYOUT, SCALE_TYPES, gemm, integer_scales, problem, skip_elsewhere

from omniw4 import ops
from omniw4.repack import wgmma_s8
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_linear, relative_error
from shapes import Shape

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_elsewhere()


def module(
    n: int = 1024,
    k: int = 1024,
    rank: int = 16,
    dtype: torch.dtype = torch.float16,
    act_bits: int = 4,
    seed: int = 0,
    scale_type: str = "float16",
) -> W4A4Linear:
    quantized = make_linear(n, k, rank, smooth=True, dtype=dtype, act_bits=act_bits, seed=seed).to(DEVICE)
    if scale_type == "integer":
        quantized = integer_scales(quantized)
    linear = W4A4Linear.from_quantized(quantized)
    linear.prepare(LAYOUT, dtype=dtype)
    return linear


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_equal_bits_over_a_hundred_runs(act_bits: int, scale_type: str) -> None:
    for m, rank in ((1, 16), (704, 32), (300, 256)):
        linear = module(rank=rank, act_bits=act_bits, scale_type=scale_type)
        x = input_on_gpu(m, 1024, torch.float16)
        first = linear(x)
        for run in range(100):
            assert_same(linear(x), first, f"m {m}, run {run}")


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replayed_graph_equals_eager_on_a_hundred_inputs(dtype: torch.dtype, act_bits: int, scale_type: str) -> None:
    linear = module(1536, 576, 16, dtype, act_bits, scale_type=scale_type)
    static = input_on_gpu(61, 576, dtype)
    linear(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(static)
    for seed in range(100):
        x = input_on_gpu(61, 576, dtype, seed=seed + 10)
        static.copy_(x)
        graph.replay()
        assert_same(out, linear(x), f"input {seed}")


@pytest.mark.parametrize("m", [3, 61, 704])
@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_a_chain_of_linears_reuses_memory_safely(act_bits: int, scale_type: str, m: int) -> None:
    """Every tensor of a layer is freed and taken again by the next, whose kernels may start early; against the same
    chain with a synchronisation after each op."""
    ranks = (16, 0, 32, 16, 256, 16)
    layers = [module(act_bits=act_bits, rank=rank, seed=rank, scale_type=scale_type) for rank in ranks]
    x = input_on_gpu(m, 1024, torch.float16)

    def chain(synchronise: bool) -> torch.Tensor:
        y = x
        for layer in layers * 3:
            y = layer(y)
            if synchronise:
                torch.cuda.synchronize()
            y = y / y.float().abs().amax().clamp_min(1e-3).to(y.dtype)
        return y

    wanted = chain(True)
    for run in range(20):
        assert_same(chain(False), wanted, f"run {run}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(False)
    for run in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert_same(out, wanted, f"replay {run}")


def test_a_chain_without_other_kernels_between() -> None:
    layers = [module(seed=seed) for seed in range(6)]
    x = input_on_gpu(128, 1024, torch.float16) * 0.01
    static = [x]
    for layer in layers:
        torch.cuda.synchronize()
        static.append(layer(static[-1]))
    for run in range(50):
        y = x
        for layer in layers:
            y = layer(y)
        assert_same(y, static[-1], f"run {run}")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_weights_written_by_the_kernel_before_are_read_after_it(act_bits: int) -> None:
    """The prefetch of weights runs ahead of the copy that brings them."""
    problems = [problem(Shape(16, 2048 - 128 * i, 1024), act_bits, torch.float16) for i in range(2)]
    p = problems[0]
    buffer = torch.zeros_like(p.packed["qweight"])
    wanted = {}
    for shift in range(4):
        moved = p.packed["qweight"].roll(shift, 0)
        torch.cuda.synchronize()
        wanted[shift] = (moved, gemm(p.acts, {**p.packed, "qweight": moved}, p.linear, act_bits, torch.float16, 16))
    torch.cuda.synchronize()
    for run in range(100):
        moved, y = wanted[run % 4]
        buffer.copy_(moved)
        found = gemm(p.acts, {**p.packed, "qweight": buffer}, p.linear, act_bits, torch.float16, 16)
        assert_same(found, y, f"run {run}")


def test_a_graph_with_a_copy_right_before_the_gemm() -> None:
    p = problem(Shape(61, 1024, 1024), 4, torch.float16)
    wanted, static = p.run(), torch.empty_like(p.acts[0])
    acts = (static, *p.acts[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.copy_(p.acts[0])
        out = gemm(acts, p.packed, p.linear, 4, torch.float16, 61)
    for _ in range(10):
        static.zero_()
        graph.replay()
        assert_same(out, wanted, "after the copy")


def test_a_second_stream_is_used_and_ordered() -> None:
    linear, stream = module(), torch.cuda.Stream()
    x = input_on_gpu(512, 1024, torch.float16)
    wanted = linear(x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the copy is late on this stream; a launch on another would read zeros
        late.copy_(x)
        found = linear(late)
    stream.synchronize()
    assert_same(found, wanted, "result on a second stream")


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_every_element_is_written(act_bits: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated starts as NaN or the largest integer
    try:
        for m, n, k, rank in ((1, 8, 64, 0), (5, 24, 192, 16), (61, 200, 448, 48), (1400, 1032, 320, 16)):
            p = problem(Shape(m, n, k, rank), act_bits, torch.bfloat16)
            assert p.acts[1].isfinite().all()
            assert p.acts[2].isfinite().all()
            assert p.run().isfinite().all()
            assert p.run(epilogue="swiglu").isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_compiles_into_one_graph(act_bits: int) -> None:
    linear = module(576, 576, act_bits=act_bits)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for m in (61, 1):
        x = input_on_gpu(m, 576, torch.float16)
        assert_same(compiled(x), linear(x), f"compiled at {m} tokens")


def test_nothing_is_allocated_after_warm_up() -> None:
    linear = module()
    x = input_on_gpu(64, 1024, torch.float16)
    linear(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(20):
        linear(x)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


@pytest.mark.parametrize("smooth", [0, 1])
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
def test_the_golden_linear(rotation: str, smooth: int) -> None:
    """Codes, scales and outputs fixed in a file, through the kernels."""
    golden = {name: tensor.to(DEVICE) for name, tensor in load_file(GOLDEN).items()}
    case = f"{rotation}.smooth{smooth}.a4"
    names = ("qweight", "w_scales", "proj_down", "proj_up", "bias")
    linear = QuantizedLinear(
        LinearSpec(rotation=rotation, smooth=bool(smooth)),  # type: ignore[arg-type]
        **{name: golden[name] for name in names},
        smooth=golden["smooth"] if smooth else None,
    )
    inverse = golden["smooth"].float().reciprocal() if smooth else None
    down = wgmma_s8.pack_proj_down(golden["proj_down"])
    found = ops.quantize_lora_down(golden["x"], down, inverse, None, None, rotation, 4, 1.0, LAYOUT)
    codes, scales = wgmma_s8.unpack_activations(found[0], found[1], *golden["x"].shape)
    assert_same(codes, golden[f"{case}.qact"], "codes")
    assert_same(scales, golden[f"{case}.a_scales"], "scales")
    prepared = W4A4Linear.from_quantized(linear)
    prepared.prepare(LAYOUT)
    assert relative_error(prepared(golden["x"]), golden[f"{case}.y"]) < 1e-3
