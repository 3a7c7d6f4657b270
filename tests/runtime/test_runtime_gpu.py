"""The runtime on a GPU: a loaded or swapped model runs through the kernels and stays close to the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import omniw4
from omniw4 import ops
from omniw4.errors import UsageError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from problems import assert_same, make_input, make_linear, relative_error
from tiny_models import MODELS, quantize_blocks, write_checkpoint

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(MODELS["qwen3-bias"](), tmp_path, LinearSpec(), {"down_proj": LinearSpec(act_bits=16)})
    return tmp_path / "checkpoint"


def linears(model: torch.nn.Module) -> dict[str, W4A4Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, W4A4Linear)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_onto_a_gpu(checkpoint: Path, dtype: torch.dtype) -> None:
    loaded = omniw4.load(checkpoint, GPU, dtype)
    auto = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map={"": 0})
    for model in (loaded, auto):
        assert {tensor.device for tensor in model.state_dict().values()} == {GPU}
        for path, module in linears(model).items():
            assert module.layout == ops.kernel_layout(GPU, module.spec.act_bits), path
            assert (module.layout == "canonical") == path.endswith("down_proj"), path
            assert module.quantized().w_scales.dtype == torch.float16
    ids = torch.arange(24, device=GPU).reshape(2, 12) * 7 % 300
    with torch.no_grad():
        assert_same(loaded(ids).logits.cpu(), auto(ids).logits.cpu(), "logits")
    assert (checkpoint / ".omniw4-cache").is_dir()
    with pytest.raises(UsageError, match="float32 is not for a GPU"):
        omniw4.load(checkpoint, GPU, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_a_linear_follows_its_model_there_and_back(act_bits: int, dtype: torch.dtype) -> None:
    linear = W4A4Linear(make_linear(200, 192, act_bits=act_bits, smooth=True))
    x = make_input(33, 192, dtype)
    before = linear(x)
    linear.to(GPU)
    assert linear.layout == ops.kernel_layout(GPU, act_bits)
    there = linear(x.to(GPU))
    assert (there.device, there.dtype) == (GPU, dtype)
    # the low-rank product is in the dtype of x there, in FP32 here
    assert relative_error(there.cpu(), before) < (4e-3 if dtype == torch.float16 else 3e-2)
    linear.to("cpu")
    assert linear.layout == "canonical"
    assert_same(linear(x), before, "back on the CPU")


def test_swapping_on_a_gpu() -> None:
    model = MODELS["llama"]()
    quantized = quantize_blocks(model, LinearSpec())
    model.to(GPU, torch.float16)
    swap(model, quantized)
    for path, module in linears(model).items():
        assert module.layout == ops.kernel_layout(GPU, 4), path
        assert module.device == GPU, path
    with torch.no_grad():
        assert model(torch.arange(12, device=GPU)[None]).logits.isfinite().all()
