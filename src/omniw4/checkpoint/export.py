"""A checkpoint in other forms: a plain Hugging Face model, and the seed's single file; one linear in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

import omniw4
from omniw4.checkpoint import schema, source
from omniw4.checkpoint.reader import Checkpoint
from omniw4.checkpoint.writer import MAX_SHARD_SIZE, Entry, plan_shards
from omniw4.errors import UsageError
from omniw4.storage import TensorFileWriter, atomic_write, atomic_write_json, dtype_name, explain_os_errors

NOTE = schema.EXPORT_NOTE
SEED_FILE = "w4a4_checkpoint.safetensors"
SEED_PARTS = ("qweight", "w_scales", "proj_down", "proj_up", "smooth", "bias")
OnLinear = Callable[[int, int, str], None]  # done, total, path


def export_dequantized(
    checkpoint: Checkpoint,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    on_linear: OnLinear | None = None,
) -> torch.dtype:
    """Write an unquantized model whose linears hold the weights the quantized ones stand for.

    ``weight = (deq(qweight) + proj_up·proj_downᵀ)·H64 / smooth``, computed in FP64 and rounded once. Everything else is
    copied byte for byte. Activations are not quantized in such a model: it shows what the weights alone cost.

    Args:
        target: an empty folder, such as ``OutputFolder.result``.
        dtype: of the dequantized weights; None: that of the model's config, or float16.

    Returns:
        The dtype.

    Raises:
        StorageError: it cannot be written.
        CheckpointError: a linear holds values no reader accepts.
    """
    target = Path(target)
    chosen = dtype or _config_dtype(checkpoint)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    entries = _plain_entries(checkpoint, chosen)
    with explain_os_errors("write", target):
        target.mkdir(parents=True, exist_ok=True)
        source.copy_folder(checkpoint.folder, target)
    shards = plan_shards(entries, max_shard_size)
    files = {name: file for file in checkpoint.files for name in file.tensors}
    done = 0
    for name, shard in shards.items():
        with TensorFileWriter(target / name, {e.name: (e.dtype, e.shape) for e in shard}, {"format": "pt"}) as writer:
            for entry in shard:
                if entry.linear is None:
                    writer.write_bytes(entry.name, files[entry.name].chunks(entry.name))
                    continue
                weight = checkpoint.linear(entry.linear).dequantize(torch.float64)
                writer.write(entry.name, weight.to(chosen))
                done += 1
                if on_linear is not None:
                    on_linear(done, len(checkpoint.specs), entry.linear)
    atomic_write(target / schema.CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
        total = sum(entry.nbytes for entry in entries)
        atomic_write_json(target / schema.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_note(checkpoint, target, "hf", chosen)
    return chosen


def export_seed(checkpoint: Checkpoint, target: str | Path, *, on_linear: OnLinear | None = None) -> Path:
    """Write the quantized linears into one file, ``w4a4_checkpoint.safetensors``, as the seed's runtime reads them.

    ``<path>.qweight`` [N, K/2] uint8, ``<path>.w_scales`` [N, K/64] float16, ``<path>.proj_down`` [K, R] and
    ``<path>.proj_up`` [N, R] float16, ``<path>.smooth`` and ``<path>.bias`` where there are any; codes and scales byte
    for byte, the rest rounded to float16 where it was bfloat16. No config, no other tensors: the base model has them.

    Raises:
        UsageError: the checkpoint holds what that runtime does not know; the message names the first such linear.
        StorageError: it cannot be written.
    """
    for path, spec in checkpoint.specs.items():
        for what, found, wanted in (
            ("rotation", spec.rotation, "none"),
            ("act_bits", spec.act_bits, 4),
            ("act_clip", spec.act_clip, 1.0),
            ("scale_type", spec.scale_type, "float16"),
        ):
            if found != wanted:
                raise UsageError(
                    f"the seed's format cannot hold {path}: its {what} is {found}, wanted {wanted}",
                    hint="quantize with `--config seed`, or use --dequantize",
                )
    file = Path(target) / SEED_FILE
    stored = {name: info for shard in checkpoint.files for name, info in shard.tensors.items()}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in checkpoint.specs:
        for part in SEED_PARTS:
            if (info := stored.get(f"{path}.{part}")) is not None:
                layout[f"{path}.{part}"] = ("U8" if part == "qweight" else "F16", info.shape)
    with explain_os_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with TensorFileWriter(file, layout, {"format": "pt"}) as writer:
        for done, path in enumerate(checkpoint.specs, start=1):
            for part, tensor in checkpoint.linear(path).tensors().items():
                writer.write(f"{path}.{part}", tensor if part == "qweight" else tensor.to(torch.float16))
            if on_linear is not None:
                on_linear(done, len(checkpoint.specs), path)
    _write_note(checkpoint, file.parent, "seed", torch.float16)
    return file


def _write_note(checkpoint: Checkpoint, target: Path, form: str, dtype: torch.dtype) -> None:
    note = {
        "omniw4_version": omniw4.__version__,
        "format": form,
        "dtype": str(dtype).removeprefix("torch."),
        "checkpoint": checkpoint.hash,
        "source": checkpoint.provenance["source"],
        "recipe": checkpoint.recipe,
    }
    atomic_write_json(target / NOTE, note)


def _config_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype config.json names, where it is one a weight can have."""
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    return dtype if dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float16


def _plain_entries(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Entry]:
    """Every tensor of the plain model, in natural order; biases of quantized linears are copied."""
    entries = [
        Entry(f"{path}.weight", dtype_name(dtype), (linear.out_features, linear.in_features), path)
        for path, linear in checkpoint.linears.items()
    ]
    biases = {f"{path}.bias" for path in checkpoint.specs}
    kept = {*checkpoint.other_names, *biases}
    for file in checkpoint.files:
        entries += [Entry(name, i.dtype, i.shape, None) for name, i in file.tensors.items() if name in kept]
    return sorted(entries, key=lambda entry: schema.natural_order(entry.name))
