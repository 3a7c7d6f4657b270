"""On a GPU: timing through graphs, the ceilings, and ops and models timed through kernels."""

import pytest
import torch

from omniw4 import bench
from omniw4.bench.ceilings import measure_ceiling
from omniw4.bench.environment import environment
from omniw4.bench.linear import MAX_COPIES, distinct_weights
from omniw4.bench.timing import measure, measure_eager
from tiny_checkpoint import make_checkpoint, make_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("timer", [measure, measure_eager])
def test_timing_grows_with_the_work(timer):
    """Not a speed: a product 64 times larger takes longer, and each sample is the time of one call."""
    small, large = (torch.randn(n, n, device="cuda") for n in (1024, 4096))
    one = timer([lambda: large @ large], "cuda", warmup=2, repetitions=5)
    many = timer([lambda: large @ large] * 4, "cuda", warmup=2, repetitions=5)
    assert len(one.samples) == 5
    assert timer([lambda: small @ small], "cuda", repetitions=5).median < one.median
    assert one.median / 2 < many.median < one.median * 2


def test_replays_do_the_work():
    counter = torch.zeros((), device="cuda")
    measure([lambda: counter.add_(1)], "cuda", warmup=2, repetitions=3)
    assert int(counter) == 1 + 2 + 3  # once before the capture, then every replay


def test_ceilings_and_environment():
    ceiling = measure_ceiling("cuda", repetitions=3)
    assert ceiling.tops > 1
    assert ceiling.gbs > 1
    found = environment("cuda", warmup=1, repetitions=2)
    assert found.capability.startswith("sm")
    assert found.cuda in found.line()


def test_weights_flow_through_the_cache():
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = distinct_weights(torch.device("cuda"), 4096, 12288)
    assert 2 <= copies <= MAX_COPIES
    assert copies * 4096 * 12288 // 2 >= 2 * cache or copies == MAX_COPIES


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ops_pass_their_check_and_are_timed(dtype):
    result = bench.run(
        what=("ops",), shapes=[(1, 64, 128), (77, 192, 1024)], device="cuda", dtype=dtype, warmup=1, repetitions=3
    )
    assert result.path != "reference"
    for row in result.ops:
        assert row.checked, (row.op, row.m, row.error, row.tolerance)
        assert row.roofline > 0
        assert row.timing.median > 0
    assert result.ceiling is not None


def test_a_model_is_timed_as_it_is_and_captured(tmp_path):
    model = make_model(tmp_path / "model", "qwen3")
    folder = make_checkpoint(tmp_path / "out", model)
    result = bench.run(folder, model, what=("model",), prefill=[(2, 32)], device="cuda", warmup=1, repetitions=3)
    assert result.passed
    assert [row.mode for row in result.model] == ["eager", "graph"]
    assert all(row.quantized is not None for row in result.model), [row.note for row in result.model]
    assert "reference" not in result.model[0].path
