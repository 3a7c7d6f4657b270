"""Tiny random models of several architectures, and checkpoints made of them without calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4 import config, int4
from omniw4 import model as models
from omniw4.checkpoint import LayerStore, assemble
from omniw4.hadamard import hadamard64
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _random(Qwen3ForCausalLM, Qwen3Config(**{**_SIZES, "head_dim": 32, **changes}))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _random(LlamaForCausalLM, LlamaConfig(**{**_SIZES, **changes}))


# name -> builder: tied and untied heads, with and without biases
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "qwen3-bias": lambda: qwen3(attention_bias=True, tie_word_embeddings=False),
    "llama": lambda: llama(tie_word_embeddings=False),
    "llama-bias": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
}


def round_to_nearest(weight: torch.Tensor, bias: torch.Tensor | None, spec: LinearSpec) -> QuantizedLinear:
    """Data-free quantization: codes of the (rotated, smoothed) weight, and the SVD of what they miss."""
    weight = weight.detach().float()
    smooth = torch.linspace(0.5, 2.0, weight.shape[1]).half() if spec.smooth else None
    if smooth is not None:
        weight = weight * smooth.float()
    if spec.rotation == "hadamard64":
        weight = hadamard64(weight)
    codes, scales = int4.quantize_groups(weight)
    down = up = None
    if spec.rank:
        u, s, v = torch.linalg.svd(weight - int4.dequantize(codes, scales), full_matrices=False)
        down, up = (v[: spec.rank].T * s[: spec.rank]).half().contiguous(), u[:, : spec.rank].half().contiguous()
    return QuantizedLinear(
        spec, int4.pack_nibbles(codes), scales, down, up, smooth, None if bias is None else bias.detach().half()
    )


def quantize_blocks(
    model: nn.Module, spec: LinearSpec, overrides: Mapping[str, LinearSpec] | None = None
) -> dict[str, QuantizedLinear]:
    """Every linear of the repeated blocks by path; ``overrides`` maps the end of a path to another spec."""
    quantized = {}
    for path, linear in models.block_linears(model).items():
        chosen = next((s for end, s in (overrides or {}).items() if path.endswith(end)), spec)
        quantized[path] = round_to_nearest(linear.weight, linear.bias, chosen)
    return quantized


def write_checkpoint(
    source: nn.Module | str | Path,
    folder: Path,
    spec: LinearSpec,
    overrides: Mapping[str, LinearSpec] | None = None,
    **options: Any,
) -> dict[str, QuantizedLinear]:
    """Quantize a model (or a saved one) and write ``folder/checkpoint``; returns what is in it.

    Args:
        options: of :func:`omniw4.checkpoint.assemble`, such as ``max_shard_size``.
    """
    if isinstance(source, nn.Module):
        source.save_pretrained(folder / "source")  # type: ignore[operator]
        source = folder / "source"
    loaded = models.load(source)
    quantized = quantize_blocks(loaded.model, spec, overrides)
    store = LayerStore(folder / "layers")
    for path, linear in quantized.items():
        store.put(path, linear, _report(path, linear))
    recipe = config.load("rtn").recipe.model_dump(mode="json")
    assemble(folder / "checkpoint", store, loaded, recipe=recipe, **options)
    return quantized


def _report(path: str, linear: QuantizedLinear) -> LayerReport:
    return LayerReport(path, linear.out_features, linear.in_features, "rtn", 0.01, 20.0, 0.0, 0.3)


def _random(cls: Any, configuration: Any) -> nn.Module:
    """Weights large enough that a wrong linear shows, biases that are not zero."""
    torch.manual_seed(0)
    model = cls(configuration).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model
