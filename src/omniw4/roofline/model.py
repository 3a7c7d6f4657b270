"""The linears, attention and norms of a model: from its config alone, from a checkpoint's headers, or of OmniVoice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omniw4.errors import ModelError

FORWARD = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class LinearOp:
    """``count`` linears of one role and shape, such as ``self_attn.q_proj``; ``rank`` of the low-rank branch."""

    name: str
    n: int
    k: int
    count: int = 1
    rank: int = 0


@dataclass(frozen=True)
class NormOp:
    """``count`` RMSNorms of ``width`` over ``elements`` numbers a token (q/k-norms run over every head)."""

    name: str
    width: int
    elements: int
    count: int = 1


@dataclass(frozen=True)
class Backbone:
    """What a forward of the repeated blocks consists of."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[LinearOp, ...]
    norms: tuple[NormOp, ...]

    def fused(self) -> Backbone:
        """q, k and v as one linear, gate and up as one; q/k-norms go with the rotary embedding."""
        inside = [op for op in self.norms if op.name.rpartition(".")[2] in ("q_norm", "k_norm")]
        norms = tuple(op for op in self.norms if op not in inside)
        return replace(self, linears=tuple(_merge(self.linears)), norms=norms)


def omnivoice(rank: int = 16) -> Backbone:
    """OmniVoice's backbone: hidden 1024, 28 layers, 16 query and 8 key/value heads of 128, MLP 3072."""
    shapes = {
        "self_attn.q_proj": (2048, 1024), "self_attn.k_proj": (1024, 1024), "self_attn.v_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048), "mlp.gate_proj": (3072, 1024), "mlp.up_proj": (3072, 1024),
        "mlp.down_proj": (1024, 3072),
    }  # fmt: skip
    linears = tuple(LinearOp(name, n, k, 28, rank) for name, (n, k) in shapes.items())
    norms = (
        *(NormOp(name, 1024, 1024, 28) for name in ("input_layernorm", "post_attention_layernorm")),
        NormOp("self_attn.q_norm", 128, 2048, 28),
        NormOp("self_attn.k_norm", 128, 1024, 28),
        NormOp("norm", 1024, 1024, 1),
    )
    return Backbone("OmniVoice's backbone", 28, 16, 8, 128, linears, norms)


def of_config(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int, int]], norms: Mapping[str, int]
) -> Backbone:
    """A backbone from shapes.

    Args:
        config: of the backbone: num_attention_heads, num_key_value_heads, head_dim, hidden_size.
        shapes: ``(N, K, rank)`` of the linears of the blocks by full path.
        norms: width of the norm weights by full path.

    Raises:
        ModelError: the config does not say how many heads there are.
    """
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ModelError(
            f"config.json of {name!r} has no num_attention_heads", hint="the roofline needs a decoder's config"
        )
    head_dim = config.get("head_dim") or int(config.get("hidden_size") or heads) // heads
    kv_heads = config.get("num_key_value_heads") or heads
    counted: dict[tuple[str, int, int, int], int] = {}
    for path, (n, k, rank) in shapes.items():
        key = (_role(path), n, k, rank)
        counted[key] = counted.get(key, 0) + 1
    linears = _forward_order(LinearOp(role, n, k, count, rank) for (role, n, k, rank), count in counted.items())
    widths: dict[tuple[str, int], int] = {}
    for path, width in norms.items():
        widths[_role(path), width] = widths.get((_role(path), width), 0) + 1
    per_token = {"q_norm": heads, "k_norm": kv_heads}
    norm_ops = tuple(
        NormOp(role, width, width * (per_token.get(role.rpartition(".")[2], 1) if width == head_dim else 1), count)
        for (role, width), count in widths.items()
    )
    layers = len({match[1] for path in shapes if (match := _INDEX.search(path))})
    return Backbone(name, layers or 1, heads, kv_heads, head_dim, linears, norm_ops)


def of_checkpoint(folder: str | Path) -> Backbone:
    """The backbone of an omniw4 checkpoint, from its headers; linears left in 16 bits are counted as the others."""
    from omniw4.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config.get("llm_config") or checkpoint.config.get("text_config") or checkpoint.config
    shapes = {
        path: (linear.out_features, linear.in_features, checkpoint.specs[path].rank)
        for path, linear in checkpoint.linears.items()
    }
    tensors = {name: info.shape for file in checkpoint.files for name, info in file.tensors.items()}
    norms = {
        name.removesuffix(".weight"): tensors[name][0]
        for name in checkpoint.other_names
        if name.endswith("norm.weight") and len(tensors[name]) == 1
    }
    return of_config(checkpoint.folder.resolve().name, config, shapes, norms)


def of_source(source: str, rank: int, *, gguf_file: str | None = None, trust_remote_code: bool = False) -> Backbone:
    """The backbone of an unquantized model, without its weights.

    Raises:
        ModelError: there is no such model, or none made of nn.Linear blocks.
    """
    from omniw4 import model as models

    skeleton = models.skeleton(source, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    path, backbone = models.find_backbone(skeleton)
    config = getattr(backbone, "config", getattr(skeleton, "config", None))
    known = config.to_dict() if config is not None else {}
    shapes = {
        p: (linear.out_features, linear.in_features, rank) for p, linear in models.block_linears(skeleton).items()
    }
    norms = {
        f"{path}.{name}".lstrip("."): module.weight.shape[0]
        for name, module in backbone.named_modules()
        if type(module).__name__.endswith("Norm") and getattr(module, "weight", None) is not None
    }
    return of_config(Path(source).name or source, known, shapes, norms)


_INDEX = re.compile(r"\.(\d+)\.")


def _role(path: str) -> str:
    """``model.layers.3.self_attn.q_proj`` to ``self_attn.q_proj``; a path without a number keeps its last part."""
    match = _INDEX.search(path)
    return path[match.end() :] if match else path.rpartition(".")[2]


def _forward_order(linears: Iterable[LinearOp]) -> tuple[LinearOp, ...]:
    """A checkpoint lists linears by name, a model by construction: those of known roles in the order they run in.

    A linear of another role keeps its place.
    """
    ops = list(linears)
    known = [i for i, op in enumerate(ops) if op.name.rpartition(".")[2] in FORWARD]
    ordered = sorted((ops[i] for i in known), key=lambda op: FORWARD.index(op.name.rpartition(".")[2]))
    for i, op in zip(known, ordered, strict=True):
        ops[i] = op
    return tuple(ops)


def _merge(linears: Iterable[LinearOp]) -> Iterable[LinearOp]:
    """Linears with one input as one of their rows together, where all of them are there."""
    by_name = {op.name: op for op in linears}
    done: set[str] = set()
    for op in by_name.values():
        parent, _, leaf = op.name.rpartition(".")
        prefix = f"{parent}." if parent else ""
        for fused, parts in FUSED.items():
            group = [by_name.get(prefix + part) for part in parts]
            if leaf in parts and all(g and (g.k, g.count, g.rank) == (op.k, op.count, op.rank) for g in group):
                if prefix + fused not in done:
                    done.add(prefix + fused)
                    yield LinearOp(prefix + fused, sum(g.n for g in group if g), op.k, op.count, op.rank)
                break
        else:
            yield op
