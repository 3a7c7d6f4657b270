"""A quantized linear that is misused, shared, or whose memory ends: an exception, and the next call is right.

Every test runs on the CPU, through the reference, and on a GPU, through the kernels, where there is one.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable

import pytest
import steps
import torch

from omniw4 import ops
from omniw4.errors import OpError
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import ScaleType
from problems import assert_same, make_input, make_linear

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
EVERYWHERE = pytest.mark.parametrize("device", DEVICES, ids=["cpu", "gpu"])
K = steps.WIDTH


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


def example(device: torch.device, tokens: int = 33) -> tuple[W4A4Linear, torch.Tensor, torch.Tensor]:
    """A linear, an input, and what it makes of it."""
    module = steps.linear(device)
    x = make_input(tokens, K, dtype_on(device)).to(device)
    return module, x, module(x)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "width": lambda x: x[:, :-1],
    "twice the width": lambda x: torch.cat((x, x), 1),
    "integers": lambda x: x.to(torch.int32),
    "bytes": lambda x: x.to(torch.int8),
    "complex": lambda x: x.to(torch.complex64),
    "boolean": lambda x: x > 0,
    "FP64": lambda x: x.double(),
}


@EVERYWHERE
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_refused_and_the_next_is_right(device: torch.device, name: str) -> None:
    module, x, wanted = example(device)
    with pytest.raises(OpError):
        module(WRONG[name](x))
    assert_same(module(x), wanted, f"the call after {name}")


@EVERYWHERE
def test_operands_that_do_not_belong_together(device: torch.device) -> None:
    """What no module would pass: each is refused by the op, and the process lives."""
    module, x, wanted = example(device)
    qweight, w_scales, _, down, up, inv_smooth = module._operands(x.dtype)
    spec = module.spec
    quantize = (x, down, inv_smooth, None, None, spec.rotation, spec.act_bits, spec.act_clip, module.layout)
    acts = ops.quantize_lora_down(*quantize)
    gemm = (acts[0], acts[1], qweight, w_scales, acts[2], up, module.bias, None, len(x), module.out_features)
    rest = (spec.act_bits, "plain", x.dtype, module.layout)
    assert_same(ops.gemm_lora_up(*gemm, *rest), wanted, "the ops by hand")
    for position, wrong in (
        (0, acts[0].flatten()[:-1]),
        (1, acts[1].double()),
        (2, qweight[:-1]),
        (3, w_scales.flatten()),
        (5, up[..., :-1] if up is not None else None),
        (5, up.flatten() if up is not None else None),
        (6, torch.zeros(3, device=device, dtype=x.dtype)),
        (8, len(x) + 16),  # a family that pads tokens to 16 cannot tell one more of them from its padding
        (9, module.out_features * 64),
    ):
        changed = list(gemm)
        changed[position] = wrong
        with pytest.raises(OpError):
            ops.gemm_lora_up(*changed, *rest)
    assert_same(module(x), wanted, "the call after all of them")


@EVERYWHERE
def test_any_view_gives_the_bits_of_a_copy(device: torch.device) -> None:
    module = steps.linear(device)
    wide = make_input(70, 3 * K + 40, dtype_on(device)).to(device)
    views = {
        "rows apart": wide[:, K : 2 * K],
        "not aligned": wide[:, 3 : 3 + K],
        "every other row": wide[::2, :K],
        "every other column": wide[:, 0 : 2 * K : 2],
        "one row repeated": wide[:1, :K].expand(9, K),
        "columns first": wide[:, :K].T.contiguous().T,
        "no row": wide[:0, :K],
        "three dimensions": wide[:6, :K].reshape(2, 3, K),
    }
    for name, view in views.items():
        assert_same(module(view), module(view.contiguous().clone()), name)


@EVERYWHERE
def test_two_threads(device: torch.device) -> None:
    """Each with inputs of its own, through one module and through two."""
    module, _, _ = example(device)
    inputs = [make_input(m, K, dtype_on(device), seed=m).to(device) for m in (1, 33, 190, 257)]
    wanted = [module(x) for x in inputs]
    failures: list[str] = []

    def work(one: W4A4Linear, number: int) -> None:
        try:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream(device))
            with torch.cuda.stream(stream):
                for turn in range(40):
                    i = (turn + number) % len(inputs)
                    assert_same(one(inputs[i]), wanted[i], f"thread {number}, turn {turn}")
        except BaseException as e:
            failures.append(f"{type(e).__name__}: {e}")

    for modules in ((module, module), (module, copy.deepcopy(module))):
        threads = [threading.Thread(target=work, args=(one, i)) for i, one in enumerate(modules)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)


@EVERYWHERE
def test_memory_that_is_gone_is_not_read(device: torch.device) -> None:
    """Inputs are freed and their memory overwritten while results are still needed."""
    module = steps.linear(device)
    kept, sources = [], [make_input(m, K, dtype_on(device), seed=m) for m in (5, 64, 129)]
    wanted = [module(x.to(device)).cpu() for x in sources]
    for _ in range(5):
        for x in sources:
            there = x.to(device)
            kept.append(module(there))
            del there
            torch.full((1000, K), float("nan"), dtype=dtype_on(device), device=device)
    gc.collect()
    for i, y in enumerate(kept):
        assert_same(y.cpu(), wanted[i % len(wanted)], f"result {i}")


def assert_steady(soak: steps.Soak) -> None:
    assert soak.differing == 0
    assert soak.left == 0, f"{soak.left} bytes of tensors more"
    assert soak.growth < 8 << 20, f"{soak.growth} bytes more"


@EVERYWHERE
@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_a_short_soak(device: torch.device, scale_type: ScaleType) -> None:
    """`make soak` does 10,000 steps."""
    module = steps.linear(device, scale_type=scale_type)
    assert_steady(steps.run(module, steps.linear_calls(device, most=300), device, 400))


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        (torch.device("cpu"), "reference"),
        *(pytest.param(torch.device("cuda", 0), name, marks=pytest.mark.gpu) for name in ("w4a4", "fp16")),
    ],
)
def test_a_short_soak_of_the_engine(device: torch.device, backend: str) -> None:
    """Replays of every bucket, inputs that no graph holds, one after another."""
    engine = steps.engine(steps.model(device), backend)
    calls = steps.engine_calls(engine)
    assert {len(call[2]) - 1 > steps.MAX_SEQUENCES for call in calls} == {False, True}
    assert max(len(call[0]) for call in calls) > steps.BUCKETS[-1]
    assert_steady(steps.run(engine, calls, device, 400))


def test_a_soak_notices_other_bits_and_memory_that_is_kept() -> None:
    cpu, kept = torch.device("cpu"), []

    def worsens(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones(1 << 18))
        return x + (len(kept) % 100 == 0)

    soak = steps.run(worsens, steps.linear_calls(cpu, most=50), cpu, 400)
    assert soak.differing == 4
    assert soak.growth > 100 << 20


@pytest.mark.gpu
def test_operands_on_two_devices() -> None:
    device = torch.device("cuda", 0)
    module, x, wanted = example(device)
    with pytest.raises(OpError, match="is on c"):
        module(x.cpu())
    if torch.cuda.device_count() > 1:
        with pytest.raises(OpError, match="is on cuda"):
            module(x.to("cuda:1"))
    assert_same(module(x), wanted, "the call after")


@pytest.mark.gpu
def test_two_streams() -> None:
    """Work of one module in turns on two streams, each input written late on its own stream."""
    device = torch.device("cuda", 0)
    module = steps.linear(device)
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    inputs = [make_input(200, K, torch.float16, seed=i).to(device) for i in range(2)]
    wanted = [module(x) for x in inputs]
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            torch.cuda._sleep(1_000_000)
            late[turn % 2].copy_(inputs[turn % 2])
            found.append(module(late[turn % 2]))
            late[turn % 2].zero_()
    torch.cuda.synchronize()
    for turn, y in enumerate(found):
        assert_same(y, wanted[turn % 2], f"turn {turn}")


@pytest.mark.gpu
def test_fork_after_cuda_began() -> None:
    """The child gets an exception, not a crash; the parent goes on."""
    device = torch.device("cuda", 0)
    module, x, wanted = example(device)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            module(x)
        except Exception:  # torch cannot use CUDA in a forked process, and says so
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert_same(module(x), wanted, "the parent's next call")


@pytest.mark.gpu
def test_no_memory_while_a_graph_is_captured() -> None:
    device = torch.device("cuda", 0)
    module, x, wanted = example(device)
    free, _ = torch.cuda.mem_get_info(device)

    def capture_too_much() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            module(x)
            torch.empty(2 * free, dtype=torch.uint8, device=device)

    with pytest.raises(torch.OutOfMemoryError):
        capture_too_much()
    torch.cuda.synchronize()
    assert_same(module(x), wanted, "the call after")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    graph.replay()
    assert_same(y, wanted, "a graph captured after")


@pytest.mark.gpu
def test_tensors_freed_after_a_capture() -> None:
    """A graph keeps what its kernels read but the caller's input; replays are right when all else is gone."""
    device = torch.device("cuda", 0)
    module, x, wanted = example(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    gc.collect()
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
    for _ in range(3):
        graph.replay()
        assert_same(y, wanted, "a replay")
    del rubbish


@pytest.mark.gpu
def test_a_linear_larger_than_memory_is_an_exception() -> None:
    device = torch.device("cuda", 0)
    module, x, wanted = example(device)
    free, _ = torch.cuda.mem_get_info(device)
    tokens = free // (2 * module.out_features) + 1
    with pytest.raises(torch.OutOfMemoryError):
        module(x[:1].expand(tokens, K))
    torch.cuda.empty_cache()
    assert_same(module(x), wanted, "the call after")


def test_a_copy_is_the_same() -> None:
    module = W4A4Linear(make_linear(64, K))
    x = make_input(3, K, torch.float32)
    assert_same(copy.deepcopy(module)(x), module(x), "a copy")
