"""A whole quantized linear on a GPU: determinism, graphs, streams, views, torch.compile, no leftovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, LAYOUT, canonical_codes, gemm, input_on_gpu, linear_on_gpu, quantize
from safetensors.torch import load_file

from omniw4 import ops
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_linear, relative_error

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"
pytestmark = pytest.mark.gpu


def module(n: int = 1024, k: int = 1024, rank: int = 16, dtype: torch.dtype = torch.float16) -> W4A4Linear:
    linear = W4A4Linear.from_quantized(make_linear(n, k, rank, smooth=True, dtype=dtype)).to(DEVICE)
    linear.prepare(LAYOUT, dtype=dtype)
    return linear


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor that is allocated starts as NaN, or as the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def test_equal_bits_over_a_hundred_runs() -> None:
    for m, rank in ((1, 16), (704, 32), (300, 256)):
        linear = module(rank=rank)
        x = input_on_gpu(m, 1024, torch.float16)
        first = linear(x)
        for run in range(100):
            assert_same(linear(x), first, f"m {m}, run {run}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_replayed_graph_equals_eager_on_a_hundred_inputs(dtype: torch.dtype) -> None:
    linear = module(1536, 576, 16, dtype)
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


def test_views_give_the_bits_of_contiguous_tensors() -> None:
    linear = module()
    wide = input_on_gpu(70, 3 * 1024 + 40, torch.float16)
    for name, view in {
        "rows apart": wide[:, 1024:2048],
        "not aligned": wide[:, 3 : 3 + 1024],
        "every other row": wide[::2, :1024],
        "transposed": wide[:, :1024].T.contiguous().T,
        "every other column": wide[:, 0:2048:2],
        "repeated": wide[:1, :1024].expand(9, 1024),
    }.items():
        assert_same(linear(view), linear(view.contiguous().clone()), name)
    assert_same(linear(wide[:6, :1024].view(2, 3, -1)), linear(wide[:6, :1024].contiguous()).view(2, 3, -1), "3-D")


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


def test_a_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    linear = module()
    x = input_on_gpu(17, 1024, torch.float16)
    assert_same(linear.to("cuda:1")(x.to("cuda:1")).to(DEVICE), module()(x), "result on a second GPU")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_element_is_written(dtype: torch.dtype) -> None:
    for m, n, k, rank in ((1, 8, 64, 0), (5, 24, 192, 16), (61, 200, 448, 48), (1400, 1032, 320, 16)):
        x, linear = input_on_gpu(m, k, dtype), linear_on_gpu(n, k, rank, dtype)
        acts = quantize(x, linear)
        assert acts[1].isfinite().all()
        assert acts[2].isfinite().all()
        assert gemm(acts, linear, dtype, tokens=m).isfinite().all()
        if n % 16 == 0:
            assert gemm(acts, linear, dtype, epilogue="swiglu", tokens=m).isfinite().all()
        assert ops.inv_rms(x, 1e-6).isfinite().all()


def test_compiles_into_one_graph() -> None:
    linear = module(576, 576)
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
    spec = LinearSpec(rotation=rotation, smooth=bool(smooth))  # type: ignore[arg-type]
    names = ("qweight", "w_scales", "proj_down", "proj_up", "bias")
    linear = QuantizedLinear(
        spec, **{name: golden[name] for name in names}, smooth=golden["smooth"] if smooth else None
    )
    inverse = golden["smooth"].float().reciprocal() if smooth else None
    found = ops.quantize_lora_down(golden["x"], golden["proj_down"], inverse, None, None, rotation, 4, 1.0, LAYOUT)
    codes, scales = canonical_codes(found, 5)
    assert_same(codes, golden[f"{case}.qact"], "codes")
    assert_same(scales, golden[f"{case}.a_scales"], "scales")
    module = W4A4Linear.from_quantized(linear)
    module.prepare(LAYOUT)
    assert relative_error(module(golden["x"]), golden[f"{case}.y"]) < 1e-3
