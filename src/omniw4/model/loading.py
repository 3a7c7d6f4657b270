"""Loading an unquantized model and its tokenizer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omniw4.errors import ModelError, UsageError
from omniw4.model.files import SourceFiles, as_model_error, changed, find_source, hash_source, refuse_endless
from omniw4.model.omnivoice import install_hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_KNOWN = "give a model of an architecture that transformers knows; a newer transformers may know this one"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    check_dtype(dtype)
    files = find_source(source, gguf_file)
    config, loader = _architecture(files, trust_remote_code)
    kwargs: dict[str, Any] = {"config": config} if files.gguf is None else _gguf_arguments(files.gguf)
    if dtype == "auto" and (files.gguf or torch.device(device).type == "cpu"):
        dtype = "float32"
    kwargs["dtype"] = DTYPES.get(dtype, "auto")
    if trust_remote_code:
        kwargs["trust_remote_code"] = True
    if _is_omnivoice(config):
        kwargs["train"] = True  # without its codec and text tokenizer, which quantization does not need
    hint = "copy its files again, and see that there is memory enough to hold them"
    with as_model_error(f"cannot load model {files.name!r}", hint), _quietly():
        model, info = loader.from_pretrained(
            files.folder, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    _refuse_misfits(info, files.name)
    model = model.to(device).eval()
    tokenizer = load_tokenizer(files, trust_remote_code)
    return LoadedModel(model, tokenizer, str(source), hash_source(files.weights_root), files.folder)


def check_unchanged(loaded: LoadedModel, wanted: str, *, gguf_file: str | None = None) -> None:
    """Refuse a model whose files are no longer those with the hash ``wanted``: what was read may be of two models.

    Raises:
        ModelError: they changed, or are gone.
    """
    named = Path(loaded.source).expanduser().exists()  # a Hub name is not looked up again: it may be another by now
    source = loaded.source if named else loaded.folder
    if source is not None and hash_source(find_source(source, gguf_file).weights_root) != wanted:
        raise changed(Path(loaded.source).name)


def check_dtype(dtype: str) -> None:
    """Raises UsageError for a name that is neither ``"auto"`` nor in :data:`DTYPES`."""
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(DTYPES)}")


def skeleton(
    source: str | Path, *, gguf_file: str | None = None, trust_remote_code: bool = False, with_buffers: bool = False
) -> nn.Module:
    """The model without its weights (meta device): enough for shapes and a plan, in no time and memory.

    Args:
        with_buffers: buffers are made and filled, such as the frequencies of rotary embeddings, which no file holds.
    """
    files = find_source(source, gguf_file)
    config, loader = _architecture(files, trust_remote_code)
    hint = "config.json must describe a model that transformers can build"
    with as_model_error(f"cannot build model {files.name!r}", hint), _empty_weights(with_buffers):
        return loader.from_config(config) if hasattr(loader, "from_config") else loader(config)


def _empty_weights(with_buffers: bool) -> AbstractContextManager[Any]:
    if not with_buffers:
        return torch.device("meta")
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    return init_empty_weights(include_buffers=False)


def _architecture(files: SourceFiles, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model's config, and the class whose ``from_pretrained`` loads it."""
    import transformers

    refused = f"unknown architecture of model {files.name!r}"
    hint = "copy the file again; its architecture must be one that transformers reads from GGUF"
    if files.gguf is None:
        raw = _read_config(files)
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "an unknown method")
            raise ModelError(f"model {files.name!r} is already quantized by {method}", hint="give the original model")
        if raw.get("model_type") == "omnivoice":
            _import_omnivoice(files.name)
        brings_code = bool(raw.get("auto_map"))
        kind = raw.get("model_type")
        if (
            isinstance(kind, str)
            and kind not in transformers.CONFIG_MAPPING
            and not (brings_code and trust_remote_code)
        ):
            raise ModelError(
                f"unknown architecture of model {files.name!r}: transformers has no model type {str(kind)[:80]!r}",
                hint="it brings its own code: allow it with `--trust-remote-code`" if brings_code else _NOT_KNOWN,
            )
        refused, hint = f"transformers refuses config.json of model {files.name!r}", "copy or download it again"
    gguf = {"gguf_file": files.gguf} if files.gguf else {}
    with as_model_error(refused, hint):
        config = transformers.AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code, **gguf)
    if _is_omnivoice(config):
        return config, _import_omnivoice(files.name)
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    loader = getattr(transformers, name, None)
    if loader is None and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {"AutoModelForCausalLM"}):
        loader = transformers.AutoModel
    return config, loader or transformers.AutoModelForCausalLM


def _read_config(files: SourceFiles) -> dict[str, Any]:
    try:
        raw = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(
            f"config.json of model {files.name!r} is not readable JSON: {e}", hint="copy or download it again"
        ) from e
    if not isinstance(raw, dict):
        raise ModelError(
            f"config.json of model {files.name!r} holds a {type(raw).__name__}, wanted a mapping",
            hint="copy or download it again",
        )
    refuse_endless(raw, f"model {files.name!r}")
    if raw.get("transformers_weights"):
        raise ModelError(
            f"config.json of model {files.name!r} has transformers_weights, a name of its own for the weights",
            hint="call that file model.safetensors, and take the key out of config.json",
        )
    for key, wanted in (("architectures", list), ("auto_map", dict), ("quantization_config", dict)):
        found = raw.get(key)
        fits = isinstance(found, wanted) and all(isinstance(one, str) for one in found)
        if found is not None and not fits:
            kind = f"a {wanted.__name__} of names"
            raise ModelError(
                f"config.json of model {files.name!r} has {key} {str(found)[:80]!r}, wanted {kind}",
                hint="copy or download it again",
            )
    return raw


def _is_omnivoice(config: Any) -> bool:
    return getattr(config, "model_type", None) == "omnivoice"


def _import_omnivoice(name: str) -> Any:
    try:
        from omnivoice.models.omnivoice import OmniVoice
    except ImportError as e:
        raise ModelError(
            f"model {name!r} is an OmniVoice, and the package omnivoice cannot be imported: {e}",
            hint=install_hint(e),
        ) from e
    return OmniVoice


def _gguf_arguments(gguf_file: str) -> dict[str, Any]:
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # before it existed, GGUF weights were always dequantized
    arguments: dict[str, Any] = {"gguf_file": gguf_file}
    return arguments | {"quantization_config": config(dequantize=True)} if config else arguments


def tokenizer(
    source: str | Path, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, without its weights; None where it has none."""
    return load_tokenizer(find_source(source, gguf_file), trust_remote_code)


def load_tokenizer(files: SourceFiles, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None where it has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json")
    if files.gguf is None and not any((files.folder / name).is_file() for name in names):
        return None
    gguf = {"gguf_file": files.gguf} if files.gguf else {}
    hint = "copy its tokenizer files again"
    with as_model_error(f"cannot load the tokenizer of model {files.name!r}", hint):
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
        raise ModelError(
            f"the weights of model {name!r} do not fit its config.json: it {'; it '.join(problems)}",
            hint="copy config.json and the weights of one and the same model into the folder",
        )


def _shapes_told(key: str, found: Any, wanted: Any) -> str:
    return f"{key} ({list(found)}, wanted {list(wanted)})"


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what transformers says about weights that do not fit, which is refused in our words, and without its
    progress bars where stderr is no terminal."""
    from transformers.utils import logging

    said, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    try:
        if sys.stderr.isatty():
            yield
            return
        logging.disable_progress_bar()
        with redirect_stderr(io.StringIO()):  # the bar of the GGUF reader heeds no setting; loggers are not redirected
            yield
    finally:
        logging.set_verbosity(said)
        if shown:
            logging.enable_progress_bar()
