"""``load``: a checkpoint folder to a ready model, through transformers' own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError, UsageError
from omniw4.model import DTYPES
from omniw4.model.files import as_model_error, refuse_endless
from omniw4.model.omnivoice import install_hint


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    *,
    trust_remote_code: bool = False,
    verify_hashes: bool = False,
) -> nn.Module:
    """Load a quantized model.

    Headers, names, dtypes and shapes are checked, the bytes of the weights are not: a flipped bit gives a wrong weight
    and no error. ``verify_hashes`` finds it, and reads the files once more for that.

    Args:
        folder: a checkpoint written by ``omniw4 quantize``.
        device: where to put it; on a GPU with compiled kernels the linears are repacked for them.
        dtype: of activations and of everything that is not quantized: float16, bfloat16, float32, or ``"auto"``: as
            stored, but float32 on a CPU, whose 16-bit arithmetic is slow. A GPU takes 16 bits only. Codes and scales
            keep their own dtypes.
        trust_remote_code: run model code that comes with the folder.
        verify_hashes: compare the weight files with the hashes in omniw4.json first.

    Returns:
        The model in eval mode, of the class its config.json names. An OmniVoice comes with its codec and tokenizer
        when they are in the folder.

    Raises:
        CheckpointError: the folder breaks a rule of docs/checkpoint-format.md; no tensor is ever left random. With
            ``verify_hashes`` also HashMismatchError: a file is not what was written.
        ModelError: an architecture that transformers does not know, or cannot build from this config.json.
        UsageError: a dtype that is none of the above, or a GPU that is not there.
    """
    device, dtype = torch.device(device), _parse_dtype(dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(device)!r}: this machine has no CUDA device", hint='load with device="cpu"')
    checkpoint = Checkpoint.open(folder)
    refuse_endless(checkpoint.config, f"checkpoint {checkpoint.folder.name!r}")
    if verify_hashes:
        checkpoint.check_hashes()
    import omniw4.runtime.hf  # noqa: F401  (registers the quantizer where the hook was not in time)

    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    if dtype == torch.float32 and device.type == "cuda":
        raise UsageError("dtype float32 is not for a GPU", hint="use float16 or bfloat16, or `--device cpu`")
    arguments: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    if trust_remote_code:
        arguments["trust_remote_code"] = True
    hint = "its config.json must be as `omniw4 quantize` wrote it, and the transformers one that knows the model"
    with as_model_error(f"cannot load checkpoint {checkpoint.folder.name!r}", hint):
        loader = _loader(checkpoint, arguments)
        model = loader.from_pretrained(checkpoint.folder, **arguments)
    return model.eval()  # type: ignore[no-any-return]


def _loader(checkpoint: Checkpoint, arguments: dict[str, Any]) -> Any:
    """The class to load with; adds what it needs to ``arguments``."""
    import transformers

    config = checkpoint.config
    if config.get("model_type") == "omnivoice":
        try:
            from omnivoice.models.omnivoice import OmniVoice
        except ImportError as e:
            raise ModelError(
                f"checkpoint {checkpoint.folder.name!r} is an OmniVoice, and the package omnivoice cannot be imported: "
                f"{e}",
                hint=install_hint(e),
            ) from e
        if not (checkpoint.folder / "audio_tokenizer").is_dir():
            arguments["train"] = True  # the codec would be downloaded
        return OmniVoice
    name = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def _parse_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found != "auto" and found not in DTYPES.values():
        raise UsageError(f"unknown dtype {str(dtype)!r}", hint=f"use auto, {', '.join(DTYPES)}")
    return found
