"""transformers' side: quant_method "omniw4", so that ``AutoModel*.from_pretrained(DIR)`` gives a quantized model.

Registered by ``import omniw4`` (:mod:`omniw4.runtime.transformers_hook`). transformers builds the model on the meta
device, the quantizer here puts empty :class:`~omniw4.runtime.linear.W4A4Linear` modules where the checkpoint has
quantized linears, and transformers fills them like any other module. Before that the folder is checked as a whole:
transformers would only warn about a missing tensor, and go on with random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from omniw4.checkpoint import Checkpoint
from omniw4.checkpoint.header import TensorInfo
from omniw4.checkpoint.reader import TORCH_DTYPES
from omniw4.checkpoint.schema import PARTS
from omniw4.errors import MissingTensorError, ModelError, RenamedTensorError, TensorShapeError, UnexpectedTensorError
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.prepare import prepare
from omniw4.runtime.swap import nearest, replace
from omniw4.tensors import LinearSpec, QuantizedLinear

QUANT_METHOD = "omniw4"


@register_quantization_config(QUANT_METHOD)
class OmniW4Config(QuantizationConfigMixin):
    """``quantization_config`` of config.json, kept as it is (docs/checkpoint-format.md has its keys)."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)
        self.quant_method = QUANT_METHOD


@register_quantizer(QUANT_METHOD)
class OmniW4Quantizer(HfQuantizer):
    """Reads checkpoints; quantizing is ``omniw4 quantize``'s work, saving as well."""

    requires_calibration = True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return False  # save_pretrained would lose the recipe, the reports and the hashes; copy the folder instead

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> nn.Module:
        if not checkpoint_files:
            raise ModelError("an omniw4 model is loaded from its checkpoint folder, found a state dict")
        self.checkpoint = Checkpoint.open(Path(checkpoint_files[0]).parent)
        self.paths = install(model, self.checkpoint)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        prepare(model, self.checkpoint, self.paths, model.dtype)  # type: ignore[arg-type]
        return model


def install(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Put empty quantized linears into a model on the meta device, and check that the checkpoint fills all of it.

    Returns:
        Module path in the model -> path in the checkpoint, of every quantized linear put in.

    Raises:
        TensorShapeError: a linear of another shape than the model's.
        UnexpectedTensorError: a bias where the model has none.
        MissingTensorError, RenamedTensorError: tensors the model needs and the checkpoint does not have.
    """
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    infos = {name: info for file in checkpoint.files for name, info in file.tensors.items()}
    replacements: dict[str, W4A4Linear] = {}
    paths: dict[str, str] = {}
    for path, stored in checkpoint.linears.items():
        # AutoModel loads the backbone out of a causal LM's checkpoint, and the other way round
        place = next((p for p in (path, path.removeprefix(prefix), prefix + path) if p in linears), None)
        if place is None:
            continue  # of a head this class does not have; if not, its weight is missing, which is found below
        found = (stored.out_features, stored.in_features)
        wanted = (linears[place].out_features, linears[place].in_features)
        if found != wanted:
            raise TensorShapeError(
                f"linear {path!r} is {list(found)} in the checkpoint and {list(wanted)} in the model its config.json"
                " describes",
                hint="config.json and the tensors do not belong together",
            )
        if stored.bias and linears[place].bias is None:
            raise UnexpectedTensorError(f"tensor '{path}.bias' is there, the model its config.json describes has none")
        replacements[place] = _empty(path, checkpoint.specs[path], infos, bias=linears[place].bias is not None)
        paths[place] = path
    replace(model, replacements, kept={})
    check_tensors(model, infos)
    return paths


def check_tensors(model: nn.Module, stored: Mapping[str, TensorInfo]) -> None:
    """Compare the tensors a transformers model needs with those there are.

    Args:
        stored: all tensors of the checkpoint by name; transformers' own renamings are applied to them.

    Raises:
        RenamedTensorError: one is missing and an unknown one looks like it; the message has both names.
        MissingTensorError: one is missing.
        TensorShapeError: one has another shape than the model's.
    """
    wanted = model.state_dict()
    found = _names_in_model(model, stored)
    for key, (name, merged) in found.items():
        if key in wanted and not merged and tuple(wanted[key].shape) != stored[name].shape:
            raise TensorShapeError(
                f"tensor {name!r} is {list(stored[name].shape)} in the checkpoint and {list(wanted[key].shape)} in the"
                " model its config.json describes",
                hint="config.json and the tensors do not belong together",
            )
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    partners = ties | {origin: target for target, origin in ties.items()}
    optional = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = [
        name
        for name in wanted
        if name not in found
        and partners.get(name) not in found
        and not any(pattern.search(name) for pattern in optional)
    ]
    if not missing:
        return
    more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
    lacks = f"the checkpoint lacks tensor {missing[0]!r}{more} of {type(model).__name__}"
    if other := nearest(missing[0], (name for key, (name, _) in found.items() if key not in wanted)):
        raise RenamedTensorError(f"{lacks}; it has the unknown tensor {other!r} instead")
    raise MissingTensorError(lacks, hint="quantize the model again, or load it as the class its config.json names")


def _names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Name in the model -> (name in the checkpoint, whether transformers merges or splits it on the way)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", None)
    found: dict[str, tuple[str, bool]] = {}
    for name in names:
        key, converter = rename_source_key(name, renamings, converters, prefix, wanted)
        if key not in wanted and name in wanted:
            key, converter = name, None
        found[key] = (name, converter is not None)
    return found


def _empty(path: str, spec: LinearSpec, stored: Mapping[str, TensorInfo], *, bias: bool) -> W4A4Linear:
    """A module on the meta device with the shapes and dtypes that are stored."""
    tensors = {
        part: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        for part in PARTS
        if (info := stored.get(f"{path}.{part}")) is not None
    }
    if bias and "bias" not in tensors:  # asked for all the same, so that check_tensors misses it
        tensors["bias"] = torch.empty(tensors["qweight"].shape[0], dtype=torch.float16, device="meta")
    return W4A4Linear(QuantizedLinear(spec, **tensors))
