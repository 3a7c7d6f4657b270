"""Source models: load one, name its hash, find its repeated blocks and their linears.

Everything that walks a model (calibrate, quantize, swap, verify) asks here which blocks and linears it has, so all
verbs agree on the full module paths. The *backbone* is the module that holds the repeated blocks and runs them:
``model`` in a causal LM of transformers, ``llm`` in OmniVoice.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omniw4.errors import ModelError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class LoadedModel:
    """A source model in memory.

    ``source`` is what the user named, ``folder`` where its files lie (None for a model that came without files).
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    hash: str
    folder: Path | None = None


@dataclass(frozen=True)
class LinearShape:
    out_features: int
    in_features: int
    bias: bool


def load(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load an unquantized model and its tokenizer.

    Args:
        source: a Hugging Face model folder, a ``.gguf`` file, or a name on the Hub.
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or ``"auto"``: as stored, but float32 on a CPU (whose
            16-bit arithmetic is slow) and for GGUF.
        gguf_file: name of the GGUF file inside ``source``; its weights are dequantized.
        trust_remote_code: run model code that comes with the folder.

    Returns:
        The model in eval mode on ``device``; the tokenizer is None where the folder has none.

    Raises:
        ModelError: missing or damaged files, an unknown architecture, an already quantized model, or weights whose
            names or shapes do not fit the architecture (they would have become random numbers).
        UsageError: a dtype that is none of the above.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(DTYPES)}")
    files = _find_source(source, gguf_file)
    config, loader = _architecture(files, trust_remote_code)
    kwargs: dict[str, Any] = {"config": config} if files.gguf is None else _gguf_arguments(files.gguf)
    if dtype == "auto" and (files.gguf or torch.device(device).type == "cpu"):
        dtype = "float32"
    kwargs["dtype"] = DTYPES.get(dtype, "auto")
    if trust_remote_code:
        kwargs["trust_remote_code"] = True
    if _is_omnivoice(config):
        kwargs["train"] = True  # without its codec and text tokenizer, which quantization does not need
    with _as_model_error(f"cannot load model {files.name!r}"), _no_bars_in_logs():
        model, info = loader.from_pretrained(
            files.folder, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    _refuse_misfits(info, files.name)
    model = model.to(device).eval()
    tokenizer = _load_tokenizer(files, trust_remote_code)
    return LoadedModel(model, tokenizer, str(source), hash_source(files.weights_root), files.folder)


def skeleton(source: str | Path, *, gguf_file: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The model without its weights (meta device): enough for shapes and a plan, in no time and memory."""
    files = _find_source(source, gguf_file)
    config, loader = _architecture(files, trust_remote_code)
    with _as_model_error(f"cannot build model {files.name!r}"), torch.device("meta"):
        return loader.from_config(config) if hasattr(loader, "from_config") else loader(config)


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


def find_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` by its full path, in module order; a linear used at two places appears once."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears inside the repeated blocks: what is quantized by default."""
    blocks = find_blocks(model)
    return {f"{prefix}.{path}": linear for prefix, block in blocks for path, linear in find_linears(block).items()}


def shapes(model: nn.Module) -> dict[str, LinearShape]:
    """Shape of every linear by full path."""
    return {
        path: LinearShape(linear.out_features, linear.in_features, linear.bias is not None)
        for path, linear in find_linears(model).items()
    }


_hashes: dict[tuple[str, int, int], str] = {}


def source_hash(source: str | Path, *, gguf_file: str | None = None) -> str:
    """:func:`hash_source` of a model by the name a user gives, without loading it. Raises ModelError."""
    return hash_source(_find_source(source, gguf_file).weights_root)


def hash_source(path: str | Path) -> str:
    """SHA-256 over names and contents of a model's config and weight files (a folder), or of one GGUF file.

    Tokenizer files do not count: calibration records the tokens themselves. Contents are hashed once a process.
    """
    path = Path(path)
    files = [path] if path.is_file() else [path / "config.json", *_weight_files(path)]
    total = hashlib.sha256()
    for file in files:
        stat = file.stat()
        key = (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
        if key not in _hashes:
            with file.open("rb") as f:
                _hashes[key] = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.name}\0{_hashes[key]}\n".encode())
    return total.hexdigest()


def _block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(linear.weight.numel() for linear in find_linears(blocks).values()) for _, blocks in lists]
    if max(sizes, default=0) == 0:
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks made of nn.Linear",
            hint="omniw4 quantizes decoder models whose blocks consist of nn.Linear, such as Qwen3 and Llama",
        )
    return lists[sizes.index(max(sizes))]  # the outermost of equals: named_modules goes from the root


@dataclass(frozen=True)
class _Source:
    name: str
    folder: Path
    gguf: str | None

    @property
    def weights_root(self) -> Path:
        return self.folder / self.gguf if self.gguf else self.folder


def _find_source(source: str | Path, gguf_file: str | None) -> _Source:
    name, path = str(source), Path(source).expanduser()
    if not name:
        raise ModelError("no model folder ''", hint="give a folder with config.json, or a Hub name")
    if path.suffix == ".gguf" and path.is_file():
        return _Source(path.name, path.parent, path.name)
    if path.is_file():
        raise ModelError(f"{name!r} is a file, wanted a model folder", hint="name the folder that holds config.json")
    if not path.is_dir():
        looks_local = path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~")) or path.suffix == ".gguf"
        if looks_local:
            raise ModelError(f"no model folder {name!r}", hint="give a folder with config.json, or a Hub name")
        return _Source(name, _from_hub(name, gguf_file), gguf_file)
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    label = path.resolve().name
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            found = f"it holds {', '.join(ggufs)}" if ggufs else "it holds no .gguf file"
            raise ModelError(f"no GGUF file {gguf_file!r} in model folder {name!r}; {found}")
        return _Source(label, path, gguf_file)
    if not (path / "config.json").is_file():
        hint = f"name the GGUF file with `--gguf-file {ggufs[0]}`" if ggufs else "give a Hugging Face model folder"
        raise ModelError(f"model folder {name!r} holds no config.json", hint=hint)
    weights = _weight_files(path)
    if not weights:
        raise ModelError(f"model folder {name!r} holds no weights (*.safetensors, *.bin)")
    _check_safetensors(weights)
    return _Source(label, path, None)


def _from_hub(name: str, gguf_file: str | None) -> Path:
    """Folder of a Hub model's files: from the local cache, or downloaded."""
    from huggingface_hub import snapshot_download

    weights = gguf_file or "*.safetensors*"
    with _as_model_error(f"no local folder {name!r}, and no model of that name from the Hub", "check name and network"):
        return Path(snapshot_download(name, allow_patterns=[weights, "*.json", "*.txt", "*.model", "*.py", "*.jinja"]))


def _weight_files(folder: Path) -> list[Path]:
    files = [p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file()]
    tensors = [p for p in files if p.suffix == ".safetensors"]
    return sorted(tensors or files)


def _check_safetensors(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as e:
            found = f"weights file {file.name!r} is damaged ({file.stat().st_size} bytes found)"
            raise ModelError(f"{found}: {e}", hint="copy it again") from e


def _architecture(files: _Source, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model's config, and the class whose ``from_pretrained`` loads it."""
    import transformers

    if files.gguf is None:
        raw = _read_config(files)
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "an unknown method")
            raise ModelError(f"model {files.name!r} is already quantized by {method}", hint="give the original model")
        if raw.get("model_type") == "omnivoice":
            _import_omnivoice(files.name)
    hint = "" if trust_remote_code else "a model that brings its own code needs `--trust-remote-code`"
    gguf = {"gguf_file": files.gguf} if files.gguf else {}
    with _as_model_error(f"unknown architecture of model {files.name!r}", hint):
        config = transformers.AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code, **gguf)
    if _is_omnivoice(config):
        return config, _import_omnivoice(files.name)
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    loader = getattr(transformers, name, None)
    if loader is None and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {"AutoModelForCausalLM"}):
        loader = transformers.AutoModel
    return config, loader or transformers.AutoModelForCausalLM


def _read_config(files: _Source) -> dict[str, Any]:
    try:
        raw = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"config.json of model {files.name!r} is not readable JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ModelError(f"config.json of model {files.name!r} holds a {type(raw).__name__}, wanted a mapping")
    return raw


def _is_omnivoice(config: Any) -> bool:
    return getattr(config, "model_type", None) == "omnivoice"


def _import_omnivoice(name: str) -> Any:
    try:
        from omnivoice.models.omnivoice import OmniVoice
    except ImportError as e:
        raise ModelError(
            f"model {name!r} is an OmniVoice, and the package omnivoice cannot be imported: {e}",
            hint="pip install omnivoice",
        ) from e
    return OmniVoice


def _gguf_arguments(gguf_file: str) -> dict[str, Any]:
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # before it existed, GGUF weights were always dequantized
    arguments: dict[str, Any] = {"gguf_file": gguf_file}
    return arguments | {"quantization_config": config(dequantize=True)} if config else arguments


def _load_tokenizer(files: _Source, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json")
    if files.gguf is None and not any((files.folder / name).is_file() for name in names):
        return None
    gguf = {"gguf_file": files.gguf} if files.gguf else {}
    with _as_model_error(f"cannot load the tokenizer of model {files.name!r}"):
        return AutoTokenizer.from_pretrained(files.folder, trust_remote_code=trust_remote_code, **gguf)


def _refuse_misfits(info: Any, name: str) -> None:
    """Refuse weights that the architecture does not know, or lacks: transformers would go on with random numbers."""
    info = info if isinstance(info, dict) else vars(info)
    missing, mismatched, unexpected = (
        sorted(key if isinstance(key, str) else _shapes_told(*key) for key in info.get(f"{kind}_keys") or ())
        for kind in ("missing", "mismatched", "unexpected")
    )
    problems = [
        f"{title} {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
        for title, keys in (("lacks", missing), ("has other shapes for", mismatched), ("has the unknown", unexpected))
        if keys
    ]
    if missing or mismatched:
        raise ModelError(f"the weights of model {name!r} do not fit its config.json: it {'; it '.join(problems)}")


def _shapes_told(key: str, found: Any, wanted: Any) -> str:
    return f"{key} ({list(found)}, wanted {list(wanted)})"


@contextmanager
def _no_bars_in_logs() -> Iterator[None]:
    """Without the progress bars of transformers where stderr is no terminal."""
    from transformers.utils import logging

    if sys.stderr.isatty():
        yield
        return
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of the GGUF reader heeds no setting; loggers are not redirected
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _as_model_error(what: str, hint: str = "") -> Iterator[None]:
    """Failures of transformers and huggingface_hub as one sentence; they raise nearly every builtin class."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as e:
        reason = " ".join(f"no key {e}".split() if isinstance(e, KeyError) else str(e).split())
        raise ModelError(f"{what}: {reason[:300]}", hint=hint) from e
