"""A full-size Qwen3 backbone with every linear swapped: one CUDA graph, the bits of the uncaptured forward."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, LAYOUT

from omniw4 import int4
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same

pytestmark = pytest.mark.gpu


@torch.no_grad()
def quantized(linear: torch.nn.Linear, rank: int = 16) -> QuantizedLinear:
    """Round-to-nearest codes of a linear and a random low-rank branch."""
    codes, scales = int4.quantize_groups(linear.weight.float())
    n, k = linear.weight.shape
    dtype = linear.weight.dtype
    return QuantizedLinear(
        LinearSpec(rank=rank, rotation="none"),
        qweight=int4.pack_nibbles(codes),
        w_scales=scales,
        proj_down=(torch.randn(k, rank, device=DEVICE) * k**-0.5).to(dtype),
        proj_up=(torch.randn(n, rank, device=DEVICE) * 0.01).to(dtype),
    )


@pytest.mark.parametrize("layout", [LAYOUT, "mma_s8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_graph_of_the_whole_backbone(dtype: torch.dtype, layout: str) -> None:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=512, max_position_embeddings=4096, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(DEVICE):
        model = Qwen3Model(config).to(dtype).eval()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    swap(model, {name: quantized(module) for name, module in linears.items()})
    swapped = [module for module in model.modules() if isinstance(module, W4A4Linear)]
    assert len(swapped) == 196
    for module in swapped:
        module.prepare(layout, dtype=dtype)

    # Given as a 4-D mask, as OmniVoice does: without one, transformers builds another mask under capture than outside
    # (and torch then takes another attention kernel). Two rows of a batch, the second shorter.
    lengths = torch.tensor([176, 101], device=DEVICE)
    key = torch.arange(176, device=DEVICE)
    mask = ((key < lengths[:, None, None, None]) | (key == 0)).expand(2, 1, 176, 176).contiguous()

    def forward(embeds: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state

    with torch.inference_mode():
        static = torch.randn(2, 176, 1024, device=DEVICE).to(dtype)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(static)
        for seed in range(5):
            x = torch.randn(2, 176, 1024, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)
            static.copy_(x)
            graph.replay()
            eager = forward(x)
            assert_same(forward(x), eager, f"input {seed}, uncaptured twice")
            assert eager.isfinite().all()
            assert_same(out, eager, f"input {seed}")
