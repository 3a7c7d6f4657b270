"""A model's repeated blocks and their linears, and the backbone that runs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from omniw4.errors import ModelError, UsageError


@dataclass(frozen=True)
class LinearShape:
    out_features: int
    in_features: int
    bias: bool


def find_backbone(model: nn.Module) -> tuple[str, nn.Module]:
    """The module that runs the repeated blocks, with its full path ('' when it is the model itself)."""
    path = _block_list(model)[0].rpartition(".")[0]
    return path, model.get_submodule(path)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of the backbone, in order: the ModuleList that holds the most linear weights.

    Raises:
        ModelError: no ModuleList of the model holds an ``nn.Linear``.
    """
    path, blocks = _block_list(model)
    return [(f"{path}.{i}" if path else str(i), block) for i, block in enumerate(blocks)]


def check_positions(model: nn.Module, seq_len: int, hint: str = "take shorter ones with `--seq-len {}`") -> None:
    """Refuse sequences longer than the model has positions: beyond them a model says nothing that is worth measuring.

    Args:
        hint: what to do, with a place for the longest length that fits.

    Raises:
        UsageError: its config has a ``max_position_embeddings`` below ``seq_len``.
    """
    longest = getattr(getattr(find_backbone(model)[1], "config", None), "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise UsageError(
            f"sequences of {seq_len} tokens are longer than the {longest} positions the model was made for",
            hint=hint.format(longest),
        )


def find_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` by its full path, in module order; a linear used at two places appears once."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears inside the repeated blocks: what is quantized by default."""
    blocks = find_blocks(model)
    return {f"{prefix}.{path}": linear for prefix, block in blocks for path, linear in find_linears(block).items()}


def other_matrices(model: nn.Module) -> dict[str, int]:
    """Matrices inside the repeated blocks that no ``nn.Linear`` holds, such as experts stacked in one tensor: what
    cannot be quantized. Path to number of weights."""
    found: dict[str, int] = {}
    for prefix, block in find_blocks(model):
        for path, module in block.named_modules(prefix=prefix):
            if not isinstance(module, nn.Linear):
                own = {n: p.numel() for n, p in module.named_parameters(path, recurse=False) if p.dim() > 1}
                found |= own
    return found


def shapes(model: nn.Module) -> dict[str, LinearShape]:
    """Shape of every linear by full path."""
    return {
        path: LinearShape(linear.out_features, linear.in_features, linear.bias is not None)
        for path, linear in find_linears(model).items()
    }


def _is_weight(module: nn.Module) -> bool:
    """Whether a module holds a matrix of its own."""
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(linear.weight.numel() for linear in find_linears(blocks).values()) for _, blocks in lists]
    if max(sizes, default=0) == 0:
        others = Counter(
            type(module).__name__ for blocks in lists for module in blocks[1].modules() if _is_weight(module)
        )
        found = f": they are made of {', '.join(name for name, _ in others.most_common(3))}" if others else ""
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks made of nn.Linear{found}",
            hint="omniw4 quantizes decoder models whose blocks consist of nn.Linear, such as Qwen3 and Llama",
        )
    return lists[sizes.index(max(sizes))]  # the outermost of equals: named_modules goes from the root
