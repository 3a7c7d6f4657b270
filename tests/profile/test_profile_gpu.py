"""On a GPU: kernels, launches and ceilings as they are there."""

from __future__ import annotations

import pytest
import torch

from omniw4 import profile, roofline
from omniw4.bench.backbone import SIZES, random_backbone
from omniw4.bench.omnivoice import with_random_quantized
from omniw4.bench.timing import measure
from omniw4.roofline.measure import measured
from omniw4.tensors import LinearSpec

pytestmark = pytest.mark.gpu
LAYERS = 2
# heads of 128, for which attention and q/k norm have kernels: their references in plain torch are dozens each
SMALL = {**SIZES, "num_hidden_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_a_graph_launches_once_and_transformers_hundreds_of_times() -> None:
    model = random_backbone(SMALL, torch.device("cuda"), torch.float16)
    engines = profile.backbone(
        ["hf", "fp16", "w4a4"], model, lambda: with_random_quantized(model, LinearSpec(scale_type="integer")),
        tokens=128, sequences=2, device="cuda",
    )  # fmt: skip
    result = profile.run(engines, device="cuda", tokens=128, sequences=2, steps=2, repetitions=3)
    hf, dense, quantized = result.engines
    assert hf.launches > 50 * LAYERS
    assert hf.launch_us is not None
    for engine in (dense, quantized):
        assert engine.kernels < hf.kernels / 2, engine.name
        assert engine.kernels >= 9 * LAYERS, engine.name
        assert engine.launches < hf.launches / 2, engine.name
    for engine in result.engines:
        assert engine.busy_ms > 0
        assert 0 <= engine.idle_share < 1
        assert "GEMM" in {row.kind for row in engine.breakdown}
    assert "quantize" in {row.kind for row in quantized.breakdown}


def test_measured_ceilings_are_below_the_data_sheet() -> None:
    device = torch.device("cuda")
    gpu = measured(device, lambda calls, where: measure(calls, where, repetitions=5).min)
    assert gpu.measured
    assert gpu.rates["fp16"]
    assert gpu.rates["int8"]
    sheet = roofline.of_device(torch.cuda.get_device_name(device))
    if sheet is None:
        return
    assert 0.3 * sheet.memory_gbs < gpu.memory_gbs <= sheet.memory_gbs
    for rate in ("fp16", "int8", "fp8"):
        if sheet.rates[rate]:
            assert 0.3 * sheet.rates[rate] < (gpu.rates[rate] or 0) <= 1.05 * sheet.rates[rate]  # type: ignore[operator]
