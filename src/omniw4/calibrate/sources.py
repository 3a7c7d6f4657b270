"""What is fed to the backbone: token windows, or hidden states captured elsewhere.

A file of captured hidden states (``--source``) is how a model that does not read plain text is calibrated. It is a
``.safetensors`` file with

    hidden_states   [S, L, H] float          inputs of the first block (the backbone's ``inputs_embeds``)
    mask            [S, L] bool or integer   optional; 1 for a token, 0 for padding; padding is never counted
    attention_mask  [S, L, L] or [S, 1, L, L] bool   optional; True where a token (row) may attend to another
    position_ids    [S, L] integer           optional

Without ``attention_mask``, the metadata key ``attention`` says ``causal`` (the default) or ``bidirectional``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.calibrate.dataset import ADVISED_TOKENS, MIN_TOKENS, TokenSet
from omniw4.calibrate.walk import Batch
from omniw4.errors import DatasetError
from omniw4.storage import sha256_file, told_sizes

_FILE = "docs/calibration.md describes the file, and how to capture it"
_SHAPES = {"hidden_states": (3,), "mask": (2,), "attention_mask": (3, 4), "position_ids": (2,)}


class TokenSource:
    """Token windows as a :class:`~omniw4.calibrate.walk.Source`."""

    def __init__(self, token_set: TokenSet) -> None:
        self._set = token_set

    def __len__(self) -> int:
        return len(self._set)

    def batch(self, start: int, stop: int, backbone: nn.Module) -> Batch:
        device = _device(backbone)
        tokens, mask = self._set.tokens[start:stop].to(device), self._set.mask[start:stop].to(device)
        inputs = {"input_ids": tokens}
        if not bool(mask.all()):
            inputs["attention_mask"] = mask.long()
        return Batch(inputs, mask)


@dataclass(frozen=True)
class HiddenSource:
    """Captured hidden states as a :class:`~omniw4.calibrate.walk.Source`; see the module's docstring."""

    hidden_states: torch.Tensor  # [S, L, H] float
    mask: torch.Tensor  # [S, L] bool
    attention_mask: torch.Tensor | None = None  # [S, 1, L, L] bool
    position_ids: torch.Tensor | None = None  # [S, L] int64
    bidirectional: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return self.hidden_states.shape[0]

    def batch(self, start: int, stop: int, backbone: nn.Module) -> Batch:
        parameter = next(backbone.parameters())
        mask = self.mask[start:stop].to(parameter.device)
        # padding may hold anything; a NaN there would reach every token through attention's 0 · NaN
        hidden = self.hidden_states[start:stop].to(parameter).masked_fill(~mask[..., None], 0)
        inputs: dict[str, Any] = {"inputs_embeds": hidden}
        if self.attention_mask is not None:
            inputs["attention_mask"] = _attention(self.attention_mask[start:stop].to(parameter.device), backbone)
        elif self.bidirectional:
            inputs["attention_mask"] = _attention(mask[:, None, None, :].repeat(1, 1, mask.shape[1], 1), backbone)
        elif not bool(mask.all()):
            inputs["attention_mask"] = mask.long()
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids[start:stop].to(parameter.device)
        return Batch(inputs, mask)


def read_hidden(path: str | Path, *, strict: bool = False) -> HiddenSource:
    """Read and check a file of captured hidden states.

    Raises:
        DatasetError: the file is missing, damaged, or its tensors do not fit together; no token is left unmasked;
            or, under ``strict``, there are fewer tokens than advised.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path).expanduser()
    if not path.is_file() or path.suffix != ".safetensors":
        found = "is not a .safetensors file" if path.exists() else "does not exist"
        raise DatasetError(f"source {str(path)!r} {found}", hint="--source takes captured hidden states")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in _SHAPES}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise DatasetError(
            f"source {path.name!r} is damaged ({told_sizes(path)}): {e}",
            hint="copy it, or capture it, again",
        ) from e
    hidden, mask, attention = _checked(tensors, metadata, path.name)
    counted = int(mask.sum())
    if counted < MIN_TOKENS:
        raise DatasetError(
            f"source {path.name!r} holds {counted} tokens, wanted at least {MIN_TOKENS}",
            hint="capture more hidden states, and see that mask is 1 for tokens",
        )
    warnings = []
    if counted < ADVISED_TOKENS:
        warnings.append(f"calibration on {counted} tokens, advised are at least {ADVISED_TOKENS}")
    if strict and warnings:
        raise DatasetError(warnings[0], hint="capture more hidden states, or leave out --strict")
    fingerprint = {
        "dataset": path.name,
        "source_sha256": sha256_file(path),
        "tokens": counted,
        "samples": hidden.shape[0],
        "seq_len": hidden.shape[1],
        "bos": {"policy": "source", "token": None},
    }
    bidirectional = metadata.get("attention", "causal") == "bidirectional"
    positions = tensors.get("position_ids")
    return HiddenSource(
        hidden, mask, attention, None if positions is None else positions.long(), bidirectional, fingerprint, warnings
    )


def _checked(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str], name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if "hidden_states" not in tensors:
        raise DatasetError(f"source {name!r} has no tensor 'hidden_states'", hint=_FILE)
    for key, tensor in tensors.items():
        if tensor.dim() not in _SHAPES[key]:
            axes = f"wanted {_SHAPES[key][0]} axes"
            raise DatasetError(f"{key} in source {name!r} has shape {list(tensor.shape)}, {axes}", hint=_FILE)
    hidden = tensors["hidden_states"]
    samples, length, _ = hidden.shape
    if not hidden.is_floating_point() or hidden.numel() == 0:
        found = f"{hidden.dtype} of shape {list(hidden.shape)}"
        raise DatasetError(f"hidden_states in source {name!r} are {found}", hint=_FILE)
    for key in ("mask", "position_ids", "attention_mask"):
        square = key == "attention_mask"
        wanted = (samples, length, length) if square else (samples, length)
        shape = tuple(tensors[key].shape) if key in tensors else wanted
        if shape != wanted and not (square and shape == (samples, 1, length, length)):
            raise DatasetError(f"{key} in source {name!r} has shape {list(shape)}, wanted {list(wanted)}", hint=_FILE)
    if metadata.get("attention", "causal") not in ("causal", "bidirectional"):
        raise DatasetError(
            f"metadata 'attention' of source {name!r} is {metadata['attention']!r}, wanted 'causal' or 'bidirectional'",
            hint=_FILE,
        )
    mask = tensors.get("mask", torch.ones(samples, length)) != 0
    attention = tensors.get("attention_mask")
    return hidden, mask, None if attention is None else (attention != 0).reshape(samples, 1, length, length)


def _attention(allowed: torch.Tensor, backbone: nn.Module) -> torch.Tensor:
    """A 4-D mask ``[B, 1, L, L]`` bool in the form the backbone's attention wants: eager attention adds it."""
    if getattr(getattr(backbone, "config", None), "_attn_implementation", "sdpa") != "eager":
        return allowed
    dtype = next(backbone.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _device(module: nn.Module) -> torch.device:
    """Where what is in memory of it lies: blocks that stay on disk are on the meta device."""
    there = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    return next(there, torch.device("cpu"))
