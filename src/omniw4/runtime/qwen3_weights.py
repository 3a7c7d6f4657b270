"""Read the weights of a Qwen3 backbone: from a Hugging Face model, a checkpoint, or a checkpoint on top of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.qwen3 import DenseLinear, LayerWeights, Linear, Qwen3Config, Qwen3Weights

_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HOLDERS = ("", "model", "llm", "model.model", "llm.model")  # itself, a causal LM's, OmniVoice's


def find_backbone(model: nn.Module) -> tuple[str, nn.Module]:
    """The part of a model that has ``layers`` and ``norm``: its path (empty for the model itself) and the module.

    Raises:
        ModelError: there is none.
    """
    for path in _HOLDERS:
        found: Any = model
        for name in path.split(".") if path else ():
            found = getattr(found, name, None)
        if isinstance(getattr(found, "layers", None), nn.ModuleList) and isinstance(
            getattr(found, "norm", None), nn.Module
        ):
            return path, found
    raise ModelError(
        f"a {type(model).__name__} has no Qwen3 backbone: no part of it has both layers and norm",
        hint="give a Qwen3Model, a Qwen3ForCausalLM, or a model with one as `model` or `llm`",
    )


def from_model(model: nn.Module, checkpoint: Checkpoint | None = None) -> Qwen3Weights:
    """The weights of a model in memory, shared and not copied.

    Args:
        model: holds an unquantized or quantized Qwen3 backbone.
        checkpoint: where it has a quantized linear, that one is taken instead of the model's.

    Raises:
        ModelError: no Qwen3 backbone, something in it the forward does not have, or a checkpoint of another model.
    """
    path, backbone = find_backbone(model)
    config = Qwen3Config.from_hf(backbone.config)
    found_layers = len(list(backbone.get_submodule("layers").children()))
    if found_layers != config.num_layers:
        raise ModelError(f"the backbone has {found_layers} layers, its config says {config.num_layers}")
    config = _with_frequencies(config, backbone)
    stored = None if checkpoint is None else _paths_in(checkpoint, path, config.num_layers)

    def linear(place: str) -> Linear:
        module = backbone.get_submodule(place)
        if checkpoint is not None and stored is not None and place in stored:
            found: Linear = checkpoint.linear(stored[place], _device(module))
        else:
            found = _linear(module, place)
        wanted = (module.out_features, module.in_features)
        if (found.out_features, found.in_features) != wanted:
            sizes = [found.out_features, found.in_features]
            raise ModelError(f"{place}: the checkpoint's linear is {sizes}, the model's is {list(wanted)} [N, K]")
        return found

    return Qwen3Weights(config, _layers(backbone, config, linear), _norm(backbone, "norm"))


def from_checkpoint(checkpoint: Checkpoint, device: torch.device) -> Qwen3Weights:
    """The backbone of a checkpoint, read one layer at a time; no Hugging Face model is built.

    Raises:
        ModelError: the checkpoint is of no Qwen3.
        CheckpointError: a damaged tensor, by name.
    """
    import transformers

    raw = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    raw = raw.get("llm_config") or raw
    kind = raw.get("model_type")
    if kind != "qwen3":
        raise ModelError(f"checkpoint {checkpoint.folder.name!r} is of model type {kind!r}, wanted 'qwen3'")
    config = Qwen3Config.from_hf(transformers.Qwen3Config(**raw))
    if "rope_parameters" in raw and (raw["rope_parameters"] or {}).get("rope_type", "default") != "default":
        raise ModelError("scaled rotary embeddings are read from a model", hint="use from_model(model, checkpoint)")
    prefix = _prefix(checkpoint)

    def other(name: str, *, needed: bool = True) -> torch.Tensor | None:
        full = prefix + name
        if full not in checkpoint.other_names:
            if needed:
                raise ModelError(f"checkpoint {checkpoint.folder.name!r} has no tensor {full!r}")
            return None
        return checkpoint.other(full, device)

    def linear(place: str) -> Linear:
        if prefix + place in checkpoint.specs:
            return checkpoint.linear(prefix + place, device)
        weight = other(f"{place}.weight")
        assert weight is not None
        return DenseLinear(weight, other(f"{place}.bias", needed=False))

    def layers() -> Iterator[LayerWeights]:
        for index in range(config.num_layers):
            at = f"layers.{index}"
            norms = {
                "input_norm": other(f"{at}.input_layernorm.weight"),
                "post_norm": other(f"{at}.post_attention_layernorm.weight"),
                "q_norm": other(f"{at}.self_attn.q_norm.weight", needed=False),
                "k_norm": other(f"{at}.self_attn.k_norm.weight", needed=False),
            }
            yield _assemble(at, norms, linear)

    norm = other("norm.weight")
    assert norm is not None
    return Qwen3Weights(config, layers(), norm)


def _layers(backbone: nn.Module, config: Qwen3Config, linear: Callable[[str], Linear]) -> Iterator[LayerWeights]:
    for index in range(config.num_layers):
        at = f"layers.{index}"
        attention = backbone.get_submodule(f"{at}.self_attn")
        norms: dict[str, torch.Tensor | None] = {
            "input_norm": _norm(backbone, f"{at}.input_layernorm"),
            "post_norm": _norm(backbone, f"{at}.post_attention_layernorm"),
        }
        for name in ("q_norm", "k_norm"):
            norms[name] = _norm(attention, name) if hasattr(attention, name) else None
        yield _assemble(at, norms, linear)


def _assemble(at: str, norms: dict[str, torch.Tensor | None], linear: Callable[[str], Linear]) -> LayerWeights:
    parts: dict[str, Any] = {name: linear(f"{at}.{place}") for name, place in _LINEARS.items()} | norms
    return LayerWeights(path=at, **parts)


def _norm(module: nn.Module, name: str) -> torch.Tensor:
    found = module.get_submodule(name)
    weight = getattr(found, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        raise ModelError(f"{name} is a {type(found).__name__}, wanted an RMSNorm with a weight")
    return weight.detach()


def _linear(module: nn.Module, place: str) -> Linear:
    if isinstance(module, W4A4Linear):
        return module.quantized()
    if isinstance(module, nn.Linear):
        if module.weight.is_meta:
            raise ModelError(f"{place} has no weight any more: an engine built with release=True has taken it")
        return DenseLinear(module.weight.detach(), None if module.bias is None else module.bias.detach(), module)
    raise ModelError(f"{place} is a {type(module).__name__}, wanted an nn.Linear or a quantized linear")


def release(model: nn.Module) -> None:
    """Give back the memory of the backbone's linears; the model's own forward does not run any more."""
    _, backbone = find_backbone(model)
    for layer in backbone.layers:  # type: ignore[union-attr]
        for place in _LINEARS.values():
            layer.get_submodule(place).to("meta")


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _prefix(checkpoint: Checkpoint) -> str:
    """What the names of the backbone's tensors begin with in a checkpoint: ``model.``, ``llm.`` or nothing."""
    for holder in _HOLDERS:
        prefix = f"{holder}." if holder else ""
        if f"{prefix}norm.weight" in checkpoint.other_names:
            return prefix
    raise ModelError(f"checkpoint {checkpoint.folder.name!r} has no Qwen3 backbone: no tensor is named norm.weight")


def _paths_in(checkpoint: Checkpoint, path: str, num_layers: int) -> dict[str, str]:
    """Path below the backbone -> path in the checkpoint, of its quantized linears."""
    prefix = _prefix(checkpoint)
    at = f"{prefix}layers."
    names = (*checkpoint.specs, *checkpoint.other_names)
    blocks = len({name.removeprefix(at).partition(".")[0] for name in names if name.startswith(at)})
    if blocks != num_layers:
        raise ModelError(
            f"checkpoint {checkpoint.folder.name!r} has {blocks} layers, the model has {num_layers}",
            hint="give the model that the checkpoint was made from",
        )
    found = {name.removeprefix(prefix): name for name in checkpoint.specs if name.startswith(prefix)}
    if not any(place.startswith("layers.") for place in found):
        named = f" of {path!r}" if path else ""
        raise ModelError(f"checkpoint {checkpoint.folder.name!r} quantizes no linear{named}")
    return found


def _with_frequencies(config: Qwen3Config, backbone: nn.Module) -> Qwen3Config:
    """Scaled rotary embeddings have their frequencies in the module that made them."""
    rope = getattr(backbone.config, "rope_parameters", None) or {}
    module = getattr(backbone, "rotary_emb", None)
    if rope.get("rope_type", "default") == "default" or module is None:
        return config
    inv_freq = tuple(module.inv_freq.double().tolist())
    return replace(config, inv_freq=inv_freq, rope_scaling=float(module.attention_scaling))
