"""What a checkpoint takes over from its source model: tensors as they were, config, tokenizer and other files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import torch
from torch import nn

from omniw4.checkpoint import schema
from omniw4.checkpoint.header import TensorFile, read_header
from omniw4.checkpoint.validate import read_json
from omniw4.model import LoadedModel, weight_files
from omniw4.storage import TensorFileWriter, atomic_copy, atomic_write, atomic_write_json, dtype_name
from omniw4.storage.files import read_note

_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz"),
    *(".tflite", ".mlmodel", ".engine", ".tar", ".zip"),
}
_OTHER_MODELS = (schema.MANIFEST, schema.EXPORT_NOTE, "trainer_state.json", "optimizer.pt")
_COMPONENT_FILES = ("config.json", "preprocessor_config.json")


class SourceTensors(Protocol):
    """Tensors of the source model by the names they have on disk."""

    layout: dict[str, tuple[str, tuple[int, ...]]]  # name -> safetensors dtype, shape

    def copy(self, name: str, writer: TensorFileWriter) -> None:
        """Write one tensor, byte for byte as it was."""


class FileTensors:
    """Tensors of a folder with safetensors files; their bytes are copied and never decoded."""

    def __init__(self, shards: list[TensorFile]) -> None:
        self._file = {name: shard for shard in shards for name in shard.tensors}
        self.layout = {name: (info.dtype, info.shape) for s in shards for name, info in s.tensors.items()}

    def copy(self, name: str, writer: TensorFileWriter) -> None:
        writer.write_bytes(name, self._file[name].chunks(name))


class ModuleTensors:
    """Tensors of a module in memory (its state dict), a tied one once, under the name it is tied to."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        for target, origin in ties.items():
            if target != origin and target in state and origin in state and _same_memory(state[target], state[origin]):
                del state[target]
        self._state = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        self.layout = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in self._state.items()}

    def copy(self, name: str, writer: TensorFileWriter) -> None:
        writer.write(name, self._state[name])


def open_tensors(loaded: LoadedModel, weights: Mapping[str, tuple[int, int]]) -> SourceTensors:
    """The source's tensors: from its files where they fit the module paths, otherwise from memory.

    Files do not fit when there are no safetensors (GGUF, .bin), or when transformers renames or merges tensors
    while it loads, so that a quantized linear's weight is not in them under its module path.

    Args:
        weights: ``[N, K]`` of every quantized linear by path.

    Raises:
        CheckpointError: the source's safetensors files are damaged.
    """
    if loaded.folder is None or not (loaded.folder / schema.CONFIG).is_file():
        return ModuleTensors(loaded.model)
    found_in = weight_files(loaded.folder)
    if not all(file.suffix == ".safetensors" for file in found_in):
        return ModuleTensors(loaded.model)
    files = FileTensors([read_header(file) for file in found_in])
    tied = getattr(loaded.model, "all_tied_weights_keys", None) or {}
    for path, shape in weights.items():
        name = f"{path}.weight"
        found = files.layout.get(name)
        if (found is None and name not in tied) or (found is not None and found[1] != shape):
            return ModuleTensors(loaded.model)
    return files


def source_name(loaded: LoadedModel) -> str:
    """Name of the source model: its Hub name, or the last part of its path."""
    if loaded.folder is not None and Path(loaded.source).expanduser().exists():
        return Path(loaded.source).expanduser().resolve().name
    return without_machine_paths(loaded.source)


def source_config(loaded: LoadedModel) -> dict[str, Any]:
    """The source's config.json as it was (made from the model when there is none), without paths of a machine."""
    if loaded.folder is not None and (loaded.folder / schema.CONFIG).is_file():
        config = read_json(loaded.folder / schema.CONFIG)
    else:
        config = json.loads(loaded.model.config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
        config["architectures"] = [type(loaded.model).__name__]
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    return without_machine_paths(config)


def copy_files(loaded: LoadedModel, target: Path) -> list[str]:
    """Copy tokenizer, generation config, chat template, licence and the model's own code.

    Everything in the source folder goes along, except weights, what describes another model (model cards, results of
    other verbs) and what :func:`source_config` and the shard index replace. A sub-folder goes along whole when it is a
    component of the model (it has a config of its own, as OmniVoice's ``audio_tokenizer``), not when it is another
    model of this kind: an earlier result, or a checkpoint of a training. A model without such a folder (GGUF) gets the
    files its tokenizer and generation config save.

    Returns:
        Names of the copied files relative to ``target``, sorted.
    """
    folder = loaded.folder
    if folder is None or not (folder / schema.CONFIG).is_file():
        return _save_processors(loaded, target)
    return copy_folder(folder, target)


def copy_folder(folder: Path, target: Path) -> list[str]:
    """The same for a model folder on disk, a checkpoint among them."""
    copied = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if _is_component(entry, folder):
                copied += [f for f in sorted(entry.rglob("*")) if f.is_file() and not f.name.startswith(".")]
        elif not _is_replaced(entry.name):
            copied.append(entry)
    names = [str(file.relative_to(folder)) for file in copied]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_copy(folder / name, target / name)
    return names


def _is_component(folder: Path, parent: Path) -> bool:
    if not any((folder / name).is_file() for name in _COMPONENT_FILES):
        return False
    if any((folder / name).is_file() for name in _OTHER_MODELS):
        return False
    mine, theirs = (read_note(place / schema.CONFIG) for place in (folder, parent))
    kinds = [config.get("model_type") if isinstance(config, dict) else None for config in (mine, theirs)]
    return kinds[0] is None or kinds[0] != kinds[1]


def without_machine_paths(value: Any) -> Any:
    """JSON-like data in which an absolute path is replaced by its last part: a checkpoint knows no machine."""
    if isinstance(value, Mapping):
        return {key: without_machine_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_machine_paths(item) for item in value]
    if isinstance(value, str):
        for kind in (PurePosixPath, PureWindowsPath):
            path = kind(value)
            if path.is_absolute() or value.startswith(("~/", "./", "../")):
                return path.name or value
    return value


def untie(config: dict[str, Any], quantized: Iterable[str], loaded: LoadedModel) -> None:
    """A quantized linear that was tied to an embedding is so no more: the config must not ask for it."""
    ties = getattr(loaded.model, "all_tied_weights_keys", None) or {}
    if any(f"{path}.weight" in ties for path in quantized):
        config["tie_word_embeddings"] = False


def _is_replaced(name: str) -> bool:
    lower = name.lower()
    return (
        name in (schema.CONFIG, schema.MANIFEST, schema.EXPORT_NOTE, *schema.RESULTS)
        or lower.endswith(".index.json")
        or lower.startswith("readme")
        or any(suffix in _WEIGHT_SUFFIXES for suffix in Path(lower).suffixes)  # of model.safetensors.bak as well
    )


def _save_processors(loaded: LoadedModel, target: Path) -> list[str]:
    """Files of a tokenizer and a generation config that exist in memory alone."""
    names = []
    generation = getattr(loaded.model, "generation_config", None)
    if generation is not None:
        names.append("generation_config.json")
        atomic_write_json(target / names[-1], without_machine_paths(json.loads(generation.to_json_string())))
    if loaded.tokenizer is not None:
        with tempfile.TemporaryDirectory(dir=target, prefix=".tokenizer-") as scratch:
            loaded.tokenizer.save_pretrained(scratch)
            for file in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
                name = str(file.relative_to(scratch))
                names.append(name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                if file.name == "tokenizer_config.json":
                    settings = json.loads(file.read_text(encoding="utf-8"))
                    for key in ("name_or_path", "gguf_file", "is_local", "local_files_only"):
                        settings.pop(key, None)
                    atomic_write_json(target / name, without_machine_paths(settings))
                else:
                    atomic_write(target / name, file.read_bytes())
    return sorted(names)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr() and a.numel() > 0
