"""A model whose weights stay on disk: its skeleton, and its tensors read one at a time, or one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from omniw4.errors import ModelError
from omniw4.model.files import changed, find_source, hash_source, weight_files
from omniw4.model.loading import DTYPES, LoadedModel, check_dtype, load_tokenizer, skeleton
from omniw4.model.tree import find_backbone, find_blocks
from omniw4.storage.files import stamp_of


@dataclass(frozen=True)
class StreamedModel:
    """The files of a model whose tensors have the names and shapes of its parameters.

    Attributes:
        loaded: the model on the meta device, without a tokenizer.
        dtype: what floating-point tensors are read as; None: as they are stored.
    """

    loaded: LoadedModel
    dtype: torch.dtype | None
    _file_of: dict[str, Path]  # every parameter and stored buffer, tied ones included
    _name_of: dict[str, str]  # its name in the file
    _stamps: dict[Path, tuple[int, int, int]]  # of each file when it was opened

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
            if stamp_of(file.stat()) != self._stamps[file]:
                raise changed(file.name)
        except (SafetensorError, OSError) as e:
            raise ModelError(f"cannot read {stored!r} of {file.name!r}: {e}", hint="copy the model again") from e
        wanted = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(wanted, copy=True)  # the file's mapping ends with the tensor that was read

    def linear(self, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight ``[N, K]`` and bias ``[N]`` of a linear."""
        bias = f"{path}.bias"
        return self.read(f"{path}.weight"), self.read(bias) if bias in self._file_of else None

    @contextmanager
    def resident(self, index: int) -> Iterator[None]:
        """Inside the with statement, block ``index`` has its tensors, on the device of the rest of the backbone."""
        path, block = find_blocks(self.loaded.model)[index]
        filled = self._fill(path, block, _device_of(self.loaded.model))
        try:
            yield
        finally:
            for module, name, empty in filled:
                setattr(module, name, empty)

    def _fill(
        self,
        path: str,
        root: nn.Module,
        device: torch.device | str,
        leave_out: Callable[[nn.Module], bool] = lambda module: False,
    ) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Read the parameters that ``root`` lacks; returns where they were put, and the empty ones from there."""
        filled: list[tuple[nn.Module, str, nn.Parameter]] = []
        read: dict[int, nn.Parameter] = {}  # a tied one is read once
        for inner, module in root.named_modules(prefix=path):
            if leave_out(module):
                continue
            prefix = f"{inner}." if inner else ""
            for name, empty in list(module._parameters.items()):
                if empty is not None and empty.is_meta:
                    if id(empty) not in read:
                        read[id(empty)] = nn.Parameter(self.read(prefix + name).to(device), requires_grad=False)
                    setattr(module, name, read[id(empty)])
                    filled.append((module, name, empty))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    stored = prefix + name in self._file_of
                    module._buffers[name] = (self.read(prefix + name) if stored else buffer).to(device)
        return filled


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
    if find_source(source, gguf_file).gguf is not None:
        return None
    return _open(source, skeleton(source, trust_remote_code=trust_remote_code), DTYPES.get(dtype, torch.float32))


def offload(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> StreamedModel:
    """A model whose blocks stay on disk until :meth:`StreamedModel.resident` asks for one; its backbone's other
    modules are loaded, and its tokenizer.

    Args:
        dtype: as of :func:`omniw4.model.load`.
        device: where what is loaded lives.

    Raises:
        ModelError: its files cannot be read tensor by tensor.
        UsageError: an unknown dtype.
    """
    check_dtype(dtype)
    files = find_source(source, gguf_file)
    on_cpu = torch.device(device).type == "cpu"
    chosen = DTYPES.get(dtype, torch.float32 if on_cpu else None)
    streamed = None
    if files.gguf is None:
        model = skeleton(source, trust_remote_code=trust_remote_code, with_buffers=True)
        streamed = _open(source, model, chosen)
    if streamed is None:
        raise ModelError(
            f"model {files.name!r} cannot be read block by block: it is not safetensors files under its own names",
            hint="leave out --offload, so that it is loaded as a whole",
        )
    if chosen is not None:
        _cast_empty(model, chosen)
    blocks = {id(module) for _, block in find_blocks(model) for module in block.modules()}
    streamed._fill(*find_backbone(model), device, leave_out=lambda module: id(module) in blocks)
    tokenizer = load_tokenizer(files, trust_remote_code)
    return replace(streamed, loaded=replace(streamed.loaded, model=model.eval(), tokenizer=tokenizer))


def resident_bytes(model: nn.Module, dtype: str = "auto") -> int:
    """Memory that a model loaded as a whole on a CPU takes, its tied parameters counted once."""
    size = DTYPES.get(dtype, torch.float32).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * size


def _open(source: str | Path, model: nn.Module, dtype: torch.dtype | None) -> StreamedModel | None:
    files = find_source(source, None)
    stored = _stored_shapes(files.folder)
    stamps = {file: stamp_of(file.stat()) for file, _ in stored.values()}
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    file_of, name_of = {}, {}
    for name, tensor in model.state_dict().items():
        found = name if name in stored else ties.get(name, name)
        if found not in stored or stored[found][1] != tuple(tensor.shape):
            return None
        file_of[name], name_of[name] = stored[found][0], found
    loaded = LoadedModel(model, None, str(source), hash_source(files.weights_root), files.folder)
    return StreamedModel(loaded, dtype, file_of, name_of, stamps)


def _stored_shapes(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every tensor of a folder's weights, as far as they are safetensors."""
    from safetensors import safe_open

    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                stored[name] = (file, tuple(handle.get_slice(name).get_shape()))
    return stored


def _device_of(model: nn.Module) -> torch.device:
    """Where the backbone's modules around the blocks live."""
    backbone = find_backbone(model)[1]
    tensors = [*backbone.parameters(), *backbone.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _cast_empty(model: nn.Module, dtype: torch.dtype) -> None:
    """Give meta parameters the dtype they will be read as; tied ones stay tied, buffers as they are."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, empty in module._parameters.items():
            if empty is not None and empty.is_floating_point():
                if id(empty) not in cast:
                    cast[id(empty)] = nn.Parameter(empty.to(dtype), requires_grad=False)
                module._parameters[name] = cast[id(empty)]
