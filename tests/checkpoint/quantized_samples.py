"""Quantized linears to store: round to nearest, which is enough to tell one from another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from omniw4 import int4
from omniw4.checkpoint import LayerStore, assemble
from omniw4.config import Recipe
from omniw4.model import LoadedModel, block_linears
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear

SPEC = LinearSpec(rank=4, act_clip=0.95)
DOWN = replace(SPEC, act_bits=8, rank=0)
SMOOTH = replace(SPEC, smooth=True, rotation="none")
RECIPE = Recipe(skip=("lm_head",), overrides=({"pattern": "*.down_proj", "act_bits": 8},)).model_dump(mode="json")
CALIBRATION = {"text": "0" * 64, "tokens": 1024, "bos": "model", "file": "/home/someone/text.txt"}
SKIPPED = {"lm_head": "outside the repeated blocks"}


def tiny_qwen3(tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=True,
        layer_types=["full_attention"] * 2,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def spec_of(path: str) -> LinearSpec:
    return DOWN if path.endswith("down_proj") else SMOOTH if path.endswith("layers.1.mlp.up_proj") else SPEC


def quantize_nearest(path: str, linear: nn.Linear) -> tuple[QuantizedLinear, LayerReport]:
    spec = spec_of(path)
    generator = torch.Generator().manual_seed(len(path))
    n, k = linear.weight.shape
    codes, scales = int4.quantize_groups(linear.weight.detach().float())

    def branch(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    quantized = QuantizedLinear(
        spec,
        int4.pack_nibbles(codes),
        scales,
        proj_down=branch(k, spec.rank) if spec.rank else None,
        proj_up=branch(n, spec.rank) if spec.rank else None,
        smooth=branch(k).abs() + 1 if spec.smooth else None,
        bias=linear.bias.detach().half() if linear.bias is not None else None,
    )
    report = LayerReport(
        path, n, k, "rtn", 0.1 + 1e-17, 12.5, 0.0, math.nan, rounds=[0.2, math.nan], seconds=1.25, warnings=["w"]
    )
    return quantized, report


def fill_store(
    partial: Path, loaded: LoadedModel, choose: Callable[[str], bool] = lambda path: True
) -> Mapping[str, QuantizedLinear]:
    store = LayerStore(partial)
    quantized = {}
    for path, linear in block_linears(loaded.model).items():
        if choose(path) and path not in store.done():
            quantized[path], report = quantize_nearest(path, linear)
            store.put(path, quantized[path], report)
    return quantized


def write_checkpoint(folder: Path, work: Path, loaded: LoadedModel, **options: object) -> Mapping[str, QuantizedLinear]:
    """Quantize the linears of the blocks and assemble a checkpoint in ``folder``."""
    quantized = fill_store(work, loaded)
    arguments = {"recipe": RECIPE, "calibration": CALIBRATION, "skipped": SKIPPED, **options}
    assemble(folder, LayerStore(work), loaded, **arguments)
    return quantized


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which resident memory rose above its start while ``work`` ran (Linux)."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before
