"""A whole quantized linear on a GPU: determinism, graphs, streams, views, torch.compile, no leftovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, LAYOUT, canonical_codes, gemm, input_on_gpu, linear_on_gpu, quantize
from safetensors.torch import load_file
from wgmma_cases import integer_scales

from omniw4 import ops
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_linear, relative_error

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"
pytestmark = pytest.mark.gpu
Family = tuple[str, str, int]  # layout, scale type, bits of the activations
FAMILIES: tuple[Family, ...] = (
    ("mma_s4", "float16", 4), ("mma_s8", "integer", 4), ("mma_s8", "integer", 8), ("mma_s8", "float16", 4),
    ("mma_s8", "float16", 8),
)  # fmt: skip
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: "-".join(map(str, family)))


def module(
    n: int = 1024,
    k: int = 1024,
    rank: int = 16,
    dtype: torch.dtype = torch.float16,
    family: Family = FAMILIES[0],
) -> W4A4Linear:
    layout, scale_type, act_bits = family
    quantized = make_linear(n, k, rank, smooth=True, dtype=dtype, act_bits=act_bits).to(DEVICE)
    linear = W4A4Linear.from_quantized(integer_scales(quantized) if scale_type == "integer" else quantized)
    linear.prepare(layout, dtype=dtype)
    return linear


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor that is allocated starts as NaN, or as the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@by_family
def test_equal_bits_over_a_hundred_runs(family: Family) -> None:
    for m, rank in ((1, 16), (704, 32), (300, 256)):
        linear = module(rank=rank, family=family)
        x = input_on_gpu(m, 1024, torch.float16)
        first = linear(x)
        for run in range(100):
            assert_same(linear(x), first, f"m {m}, run {run}")


@by_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_replayed_graph_equals_eager_on_a_hundred_inputs(dtype: torch.dtype, family: Family) -> None:
    linear = module(1536, 576, 16, dtype, family)
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


@by_family
def test_views_give_the_bits_of_contiguous_tensors(family: Family) -> None:
    linear = module(family=family)
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


@by_family
def test_a_second_stream_is_used_and_ordered(family: Family) -> None:
    linear, stream = module(family=family), torch.cuda.Stream()
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


@by_family
def test_compiles_into_one_graph(family: Family) -> None:
    torch.compiler.reset()  # a forward is recompiled a few times at most, and families share its code
    linear = module(576, 576, family=family)
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


@by_family
def test_the_module_equals_the_reference_over_the_same_linear(family: Family) -> None:
    for m in (1, 61, 705):
        linear, x = module(family=family), input_on_gpu(m, 1024, torch.float16)
        assert linear.layout == family[0]
        found = linear(x)
        linear.prepare("canonical")
        assert relative_error(found, linear(x)) < 2e-3, f"m {m}"


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
    for layout in (LAYOUT, "mma_s8"):
        module = W4A4Linear.from_quantized(linear)
        module.prepare(layout)
        assert relative_error(module(golden["x"]), golden[f"{case}.y"]) < 1e-3, layout
