"""A model of which memory holds no weights: its skeleton, and its tensors read from disk one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from omniw4.errors import ModelError
from omniw4.model.files import find_source, hash_source
from omniw4.model.loading import DTYPES, LoadedModel, check_dtype, skeleton


@dataclass(frozen=True)
class StreamedModel:
    """The files of a model whose tensors have the names and shapes of its parameters.

    Attributes:
        loaded: the model on the meta device, without a tokenizer.
        dtype: what floating-point tensors are read as.
    """

    loaded: LoadedModel
    dtype: torch.dtype
    _file_of: dict[str, Path]  # every parameter, tied ones included
    _name_of: dict[str, str]  # its name in the file

    def read(self, name: str) -> torch.Tensor:
        """One parameter or buffer, in memory of its own.

        Raises:
            ModelError: the file cannot be read, or is no longer what it was.
        """
        from safetensors import SafetensorError, safe_open

        file, stored = self._file_of[name], self._name_of[name]
        try:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(stored)
        except (SafetensorError, OSError) as e:
            raise ModelError(f"cannot read {stored!r} of {file.name!r}: {e}", hint="copy the model again") from e
        wanted = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(wanted, copy=True)  # the file's mapping ends with the tensor that was read

    def linear(self, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight ``[N, K]`` and bias ``[N]`` of a linear."""
        bias = f"{path}.bias"
        return self.read(f"{path}.weight"), self.read(bias) if bias in self._file_of else None


def stream(
    source: str | Path, *, dtype: str = "auto", gguf_file: str | None = None, trust_remote_code: bool = False
) -> StreamedModel | None:
    """Open a model for reading tensor by tensor; headers alone are read.

    Args:
        dtype: as of :func:`omniw4.model.load` on a CPU: "auto" is float32.

    Returns:
        None where the files are not safetensors, or do not hold exactly what the model has under its own names (a
        GGUF file, merged or renamed tensors): such a model must be loaded as a whole.

    Raises:
        ModelError, UsageError: as :func:`omniw4.model.load`.
    """
    check_dtype(dtype)
    files = find_source(source, gguf_file)
    if files.gguf is not None:
        return None
    model = skeleton(source, trust_remote_code=trust_remote_code)
    stored = _stored_shapes(files.folder)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    file_of, name_of = {}, {}
    for name, tensor in model.state_dict().items():
        found = name if name in stored else ties.get(name, name)
        if found not in stored or stored[found][1] != tuple(tensor.shape):
            return None
        file_of[name], name_of[name] = stored[found][0], found
    loaded = LoadedModel(model, None, str(source), hash_source(files.weights_root), files.folder)
    return StreamedModel(loaded, DTYPES.get(dtype, torch.float32), file_of, name_of)


def _stored_shapes(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every tensor of a folder's safetensors files."""
    from safetensors import safe_open

    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                stored[name] = (file, tuple(handle.get_slice(name).get_shape()))
    return stored


def resident_bytes(model: nn.Module, dtype: str = "auto") -> int:
    """Memory that a model loaded as a whole on a CPU takes, its tied parameters counted once."""
    size = DTYPES.get(dtype, torch.float32).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * size
