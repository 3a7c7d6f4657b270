"""Where a source model's files are: checked before anything is loaded, and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniw4.errors import ModelError, OmniW4Error
from omniw4.storage import told_sizes

MAX_BLOCKS = 4096  # the deepest models have a few hundred
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FLOATS = ("F16", "BF16", "F32", "F64")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class SourceFiles:
    name: str
    folder: Path
    gguf: str | None

    @property
    def weights_root(self) -> Path:
        return self.folder / self.gguf if self.gguf else self.folder


def find_source(source: str | Path, gguf_file: str | None) -> SourceFiles:
    name, path = str(source), Path(source).expanduser()
    if not name:
        raise ModelError("no model folder ''", hint="give a folder with config.json, or a Hub name")
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ModelError(f"no GGUF file {name!r}", hint="give the path of a .gguf file, or a model folder")
        if gguf_file not in (None, path.name):
            raise ModelError(
                f"{name!r} is a GGUF file, and --gguf-file names {gguf_file!r}",
                hint="--gguf-file is for a model folder",
            )
        _check_gguf(path)
        return SourceFiles(path.name, path.parent, path.name)
    if path.is_file():
        raise ModelError(f"{name!r} is a file, wanted a model folder", hint="name the folder that holds config.json")
    if not path.is_dir():
        looks_local = path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~"))
        if looks_local:
            raise ModelError(f"no model folder {name!r}", hint="give a folder with config.json, or a Hub name")
        return SourceFiles(name, _from_hub(name, gguf_file), gguf_file)
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    label = path.resolve().name
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            found = f"it holds {', '.join(ggufs)}" if ggufs else "it holds no .gguf file"
            hint = f"such as `--gguf-file {ggufs[0]}`" if ggufs else "leave out --gguf-file, or name another folder"
            raise ModelError(f"no GGUF file {gguf_file!r} in model folder {name!r}; {found}", hint=hint)
        _check_gguf(path / gguf_file)
        return SourceFiles(label, path, gguf_file)
    if not (path / "config.json").is_file():
        hint = f"name the GGUF file with `--gguf-file {ggufs[0]}`" if ggufs else "give a Hugging Face model folder"
        raise ModelError(f"model folder {name!r} holds no config.json", hint=hint)
    weights = weight_files(path)
    if not weights:
        others = sorted(p.name for p in path.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
        raise ModelError(
            f"model folder {name!r} holds no weights ({', nor '.join(_WEIGHTS)})",
            hint=f"if {others[0]!r} holds them all, call it {_WEIGHTS[0]}"
            if others
            else "copy or download them into it",
        )
    _check_safetensors(weights)
    return SourceFiles(label, path, None)


_hashes: dict[tuple[str, int, int], str] = {}


def source_hash(source: str | Path, *, gguf_file: str | None = None) -> str:
    """:func:`hash_source` of a model by the name a user gives, without loading it. Raises ModelError."""
    return hash_source(find_source(source, gguf_file).weights_root)


def hash_source(path: str | Path) -> str:
    """SHA-256 over names and contents of a model's config and weight files (a folder), or of one GGUF file.

    Tokenizer files do not count: calibration records the tokens themselves. Contents are hashed once a process.
    """
    path = Path(path)
    files = [path] if path.is_file() else [path / "config.json", *weight_files(path)]
    total = hashlib.sha256()
    for file in files:
        stat = file.stat()
        key = (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
        if key not in _hashes:
            with file.open("rb") as f:
                _hashes[key] = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.name}\0{_hashes[key]}\n".encode())
    return total.hexdigest()


def changed(name: str) -> ModelError:
    """The error for a model of whose weights some are from before a change and some from after it."""
    hint = "start again with --overwrite when nothing writes into its folder any more"
    return ModelError(f"{name!r} changed while it was read", hint=hint)


def _from_hub(name: str, gguf_file: str | None) -> Path:
    """Folder of a Hub model's files: from the local cache, or downloaded."""
    from huggingface_hub import snapshot_download

    weights = gguf_file or "*.safetensors*"
    try:
        return Path(snapshot_download(name, allow_patterns=[weights, "*.json", "*.txt", "*.model", "*.py", "*.jinja"]))
    except (OmniW4Error, MemoryError):
        raise
    except Exception as e:  # its own classes, those of the HTTP library below, and of the file system
        raise _not_from_hub(name, e) from e


def _not_from_hub(name: str, error: Exception) -> ModelError:
    """What went wrong in our words: the Hub library speaks in paragraphs, of revisions and snapshots."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    here = f"no folder {name!r} here"
    if "HFValidationError" in kinds:
        return ModelError(
            f"{here}, and it is no name of a Hub model", hint="give a folder with config.json, or OWNER/NAME"
        )
    if "GatedRepoError" in kinds:
        hint = "ask for access on its page, then log in with `hf auth login`"
        return ModelError(f"{here}, and the Hub gives the model of that name to those with access alone", hint=hint)
    if "RepositoryNotFoundError" in kinds:
        hint = "check the name; a private model needs `hf auth login`"
        return ModelError(f"{here}, and no model of that name on the Hub", hint=hint)
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException"}:
        from huggingface_hub import constants

        why = "HF_HUB_OFFLINE forbids to look on the Hub" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        hint = "check the path; a model of the Hub must be downloaded once while there is a network"
        return ModelError(f"{here} and none in the Hub's cache, and {why}", hint=hint)
    reason = (str(error).split("\n")[0] or type(error).__name__)[:200]
    return ModelError(f"{here}, and downloading it from the Hub failed: {reason}", hint="check network and disk space")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads a model from, in its order of preference; copies and adapters beside them are
    none. Empty where there is none of the names that it knows.

    Raises:
        ModelError: an index that cannot be read, or names a file that is not there or outside the folder.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
    return []


def refuse_endless(config: Mapping[str, Any], what: str) -> None:
    """Raise ModelError for a config with more blocks than any model has: transformers would build them for hours."""
    for settings in (config, *(value for value in config.values() if isinstance(value, dict))):
        found = settings.get("num_hidden_layers")
        if isinstance(found, int) and found > MAX_BLOCKS:
            raise ModelError(
                f"config.json of {what} has {str(found)[:20]} num_hidden_layers, more than the allowed {MAX_BLOCKS}",
                hint="copy or download it again",
            )


def _shards(index: Path) -> list[Path]:
    hint = "copy the model again, its index and all weights"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        reason = f"no key {e}" if isinstance(e, KeyError) else str(e)[:200]
        raise ModelError(f"{index.name!r} is no index of weights: {reason}", hint=hint) from e
    if outside or not names:
        found = f"the file {outside[0][:80]!r}, which is not in its folder" if outside else "no file"
        raise ModelError(f"{index.name!r} names {found}", hint=hint)
    shards = sorted(index.parent / name for name in names)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{index.name!r} names the file {missing[0][:80]!r}{more}, which is not there", hint=hint)
    return shards


def _check_gguf(file: Path) -> None:
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin != b"GGUF":
        size = file.stat().st_size
        raise ModelError(
            f"{file.name!r} is no GGUF file: it has {size} bytes and begins with {begin!r}, wanted b'GGUF'",
            hint="copy the file again, or give a model folder",
        )


def _check_safetensors(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    seen: dict[str, str] = {}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                _refuse_quantized(file.name, {name: opened.get_slice(name) for name in names})
        except (SafetensorError, OSError) as e:
            found = f"weights file {file.name!r} is damaged ({told_sizes(file)})"
            raise ModelError(f"{found}: {e}", hint="copy it again") from e
        for name in names:
            if name in seen:
                raise ModelError(
                    f"both {seen[name]!r} and {file.name!r} hold a tensor {name!r}",
                    hint="leave the files of one and the same model in the folder",
                )
            seen[name] = file.name


def _refuse_quantized(file: str, tensors: dict[str, Any]) -> None:
    """Matrices of integers, or of FP8, want scales that are read by whoever made them."""
    for name, tensor in tensors.items():
        dtype = tensor.get_dtype()
        if name.endswith(".weight") and len(tensor.get_shape()) > 1 and dtype not in _FLOATS:
            raise ModelError(
                f"{name} in {file!r} has the type {dtype}: the model is already quantized",
                hint="give the original model, with weights of 16 or 32 bits",
            )


@contextmanager
def as_model_error(what: str, hint: str = "") -> Iterator[None]:
    """Failures of transformers, huggingface_hub and torch as one sentence; they raise every class there is."""
    try:
        yield
    except (OmniW4Error, MemoryError):
        raise
    except Exception as e:  # such as the UnpicklingError of a .bin file that holds more than tensors
        if type(e).__name__ == "OutOfMemoryError":  # torch's, which is not imported here; no fault of the model's
            raise
        reason = " ".join(f"no key {e}".split() if isinstance(e, KeyError) else str(e).split())
        raise ModelError(f"{what}: {reason[:300]}", hint=hint) from e
