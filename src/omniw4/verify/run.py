"""The whole verification: structure and hashes, every layer, then the model against the original on held-out text."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from omniw4 import model as models
from omniw4 import ops, repack
from omniw4.calibrate.omnivoice import NUM_STEP, capture_decoding, decoding_tasks
from omniw4.calibrate.prompts import PromptSet, read_prompts
from omniw4.calibrate.sources import HiddenSource
from omniw4.checkpoint.origin import other_origin
from omniw4.checkpoint.reader import Checkpoint
from omniw4.checkpoint.schema import MANIFEST
from omniw4.checkpoint.source import source_name
from omniw4.config import Verify
from omniw4.errors import (
    CheckpointError,
    MissingFileError,
    ModelError,
    QuantMethodError,
    UnreadableFileError,
    UsageError,
)
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.load import load
from omniw4.verify import heldout, integrity
from omniw4.verify.evaluate import compare
from omniw4.verify.layers import capture_inputs, check_layer
from omniw4.verify.omnivoice import check_decoding
from omniw4.verify.result import Gate, OnProgress, Perplexity, Progress, VerifyResult, holds, judge

LAYER_TOKENS = 64
_CHECKPOINT_FIRST = "name a folder that `omniw4 quantize` wrote, and the original with --model"


def run(
    directory: str | Path,
    model: str | Path,
    *,
    dataset: str | None = None,
    prompts: str | Path | None = None,
    num_step: int = NUM_STEP,
    settings: Verify | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    bos: str | None = None,
    layer_tokens: int = LAYER_TOKENS,
    error_ranks: bool = False,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress | None = None,
) -> VerifyResult:
    """Judge a checkpoint against its original; arguments and result are described in :mod:`omniw4.verify`.

    The original and the quantized model are in memory together; tensors that the checkpoint stores as they were are
    held once. Of activations and logits one sequence is held at a time.

    Raises:
        CheckpointError: the folder is no checkpoint. A damaged one is a failed gate, not an error.
        ModelError: the original cannot be loaded, or does not have the checkpoint's linears.
        DatasetError: the held-out text is missing, unreadable, or too short for one window.
        UsageError: ``layer_tokens`` is negative.
    """
    if layer_tokens < 0:
        raise UsageError(f"layer_tokens is {layer_tokens}, wanted 0 or more", hint="0 checks no layer")
    settings = settings or Verify()
    result = VerifyResult(True, [], [], Perplexity(), None, None, None, str(device), "")
    tell = on_progress or (lambda _: None)
    with _stage(result, "structure"):
        checkpoint = _open(directory, result, tell)
    if checkpoint is None:
        return _finish(result, device)
    result.effective_bits, result.hash = checkpoint.effective_bits(), checkpoint.hash
    with _stage(result, "load"):
        source = models.load(
            model, dtype=dtype, device=device, gguf_file=gguf_file, trust_remote_code=trust_remote_code
        )
        reference, result.model = source.model, {"name": source_name(source), "hash": source.hash}
        require_linears(reference, checkpoint, source.source)
        if (
            dtype == "auto"
            and torch.device(device).type == "cuda"
            and next(reference.parameters()).dtype == torch.float32
        ):
            reference.half()  # the ops of a GPU take 16 bits only
        result.dtype = str(next(reference.parameters()).dtype).removeprefix("torch.")
        spoken = None if prompts is None else read_prompts(prompts)
        captured = None if spoken is None else _captured(source, spoken, settings, num_step)
        data = heldout.prepare(
            source,
            dataset,
            settings.windows,
            settings.seq_len,
            bos,
            calibration=checkpoint.provenance["calibration"],
            distillation=checkpoint.provenance["distillation"],
            captured=captured,
        )
        result.windows, result.bos, result.warnings = data.record, data.bos, data.warnings
        quantized = load(directory, device, result.dtype, trust_remote_code=trust_remote_code)
        result.path = kernel_path(quantized)
    result.gates.append(same_source(checkpoint, source))
    result.gates.append(_share_untouched(reference, quantized, set(checkpoint.specs)))
    with _stage(result, "layers"):
        inputs: dict[str, torch.Tensor] = {}
        if layer_tokens:
            first, forward = data.items[0], data.forward(reference)
            inputs = capture_inputs(reference, checkpoint.specs, lambda: forward(first, device), layer_tokens)
        _check_layers(checkpoint, reference, quantized, inputs, result, tell, error_ranks)
    with _stage(result, "evaluate"):
        found = compare(
            data.forward(reference), data.forward(quantized), data.items, device=device, on_progress=on_progress
        )
    result.gates.append(holds("finite_outputs", found.finite, "" if found.finite else "NaN or inf in the outputs"))
    result.perplexity = Perplexity(
        found.perplexity_reference,
        found.perplexity_quantized,
        found.ratio,
        "" if found.labelled else data.no_perplexity,
    )
    result.kl, result.argmax_agreement, result.hidden_error = found.kl, found.argmax_agreement, found.hidden_error
    if spoken is not None:
        with _stage(result, "decode"):
            tasks = decoding_tasks(source, spoken)
            result.decoding = check_decoding(reference, quantized, tasks, num_step=num_step, on_progress=on_progress)
        result.kl, result.argmax_agreement = result.decoding.kl, result.decoding.agreement
    result.seconds |= {f"forward_{name}": seconds for name, seconds in found.seconds.items()}
    result.gates += judge(settings.gates, result.perplexity, result.kl, result.argmax_agreement, result.layers)
    return _finish(result, device)


def _captured(source: models.LoadedModel, spoken: PromptSet, settings: Verify, num_step: int) -> HiddenSource:
    """As many tokens of greedy decoding as text would have."""
    tokens = settings.windows * settings.seq_len
    return capture_decoding(source, spoken, tokens=tokens, num_step=num_step, position_temperature=0.0)


def require_linears(reference: nn.Module, checkpoint: Checkpoint, name: str) -> None:
    linears = models.find_linears(reference)
    missing = [path for path in checkpoint.specs if path not in linears]
    if missing:
        raise ModelError(
            f"model {name!r} has no linear {missing[0]!r}, which the checkpoint quantizes",
            hint="give the model that the checkpoint was made from with --model",
        )
    for path, stored in checkpoint.linears.items():
        found, wanted = tuple(linears[path].weight.shape), (stored.out_features, stored.in_features)
        if found != wanted:
            raise ModelError(
                f"{path} of model {name!r} is {list(found)}, in the checkpoint it is {list(wanted)}",
                hint="give the model that the checkpoint was made from with --model",
            )


def kernel_path(model: nn.Module) -> str:
    """The kernel families the quantized linears of a model run through; ``"reference"`` for the references."""
    layouts = {m.layout for m in model.modules() if isinstance(m, W4A4Linear)}
    return "+".join(sorted("reference" if name == ops.CANONICAL else name for name in layouts))


def _open(directory: str | Path, result: VerifyResult, tell: OnProgress) -> Checkpoint | None:
    """Structure and hashes as gates; None when the structure is broken and nothing more can be asked."""
    try:
        checkpoint = Checkpoint.open(directory)
    except (MissingFileError, UnreadableFileError):
        raise
    except QuantMethodError as e:
        if not (Path(directory) / MANIFEST).is_file():  # no damaged checkpoint, but none at all
            raise UsageError(
                f"{str(directory)!r} is no checkpoint of omniw4: {e.message}", hint=_CHECKPOINT_FIRST
            ) from e
        result.gates.append(holds("structure", False, e.message))
        return None
    except CheckpointError as e:
        result.gates.append(holds("structure", False, e.message))
        return None
    result.gates.append(holds("structure", True))
    try:
        checkpoint.check_hashes()
        result.gates.append(holds("hashes", True))
    except CheckpointError as e:
        result.gates.append(holds("hashes", False, e.message))
    tell(Progress("structure", 1, 1, f"{len(checkpoint.specs)} quantized linears"))
    return checkpoint


def _check_layers(
    checkpoint: Checkpoint,
    reference: nn.Module,
    quantized: nn.Module,
    inputs: dict[str, torch.Tensor],
    result: VerifyResult,
    tell: OnProgress,
    error_ranks: bool,
) -> None:
    caches, damaged = integrity.open_caches(checkpoint.folder, checkpoint)
    broken: dict[str, list[str]] = {"finite": [], "repack": damaged, "ops": []}
    originals = models.find_linears(reference)
    started = time.perf_counter()
    for done, path in enumerate(checkpoint.specs, start=1):
        linear = checkpoint.linear(path, check_values=False)
        if names := integrity.non_finite(linear):
            broken["finite"].append(f"{path}: {', '.join(names)}")
        losses = integrity.repack_losses(linear, repack.LAYOUTS) | integrity.cache_losses(path, linear, caches)
        broken["repack"] += [f"{path}: {layout} {where}" for layout, where in losses.items()]
        detail = path
        if path in inputs:
            original = originals[path]
            check = check_layer(
                path,
                inputs[path],
                original.weight,
                original.bias,
                linear,
                quantized.get_submodule(path),
                device=original.weight.device,
                repack_identical=not losses,
                error_ranks=error_ranks,
            )
            result.layers.append(check)
            detail = f"{path}  sqnr {check.sqnr_db:.1f} dB"
            if not check.op_passed:
                broken["ops"].append(f"{path}: error {check.op_error:.2e}, at most {check.op_tolerance:.2e}")
        eta = (time.perf_counter() - started) / done * (len(checkpoint.specs) - done)
        tell(Progress("layers", done, len(checkpoint.specs), detail, eta))
    unreached = [path for path in checkpoint.specs if path not in inputs]
    if inputs and unreached:
        result.warnings.append(f"no held-out token reached {_some(unreached)}; not checked")
    result.gates += [
        holds("finite_tensors", not broken["finite"], _some(broken["finite"])),
        holds("repack_identity", not broken["repack"], _some(broken["repack"])),
    ]
    if result.layers:
        result.gates.append(holds("ops_within_tolerance", not broken["ops"], _some(broken["ops"])))


def same_source(checkpoint: Checkpoint, given: models.LoadedModel) -> Gate:
    told = other_origin(checkpoint, given.source, given.hash)
    return holds("source_model", not told, told)


def _share_untouched(reference: nn.Module, quantized: nn.Module, paths: set[str]) -> Gate:
    """Tensors that were not quantized must be those of the original, bit for bit; then one copy of them is kept.

    What the quantized model has in addition (a codec that comes with it) is not judged.
    """
    kept = _tensors(quantized)
    differing = []
    for name, original in _tensors(reference).items():
        if name.rpartition(".")[0] in paths:
            continue
        tensor = kept.get(name)
        if tensor is None or not _same_bits(original, tensor):
            differing.append(name)
        else:
            tensor.data = original.data
    return holds("untouched_tensors", not differing, f"not as in the original: {_some(differing)}" if differing else "")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both hold the same NaN, which equals nothing; 0 and -0 differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the files of a model hold. Other buffers, such as the frequencies of RoPE, are made where it is loaded."""
    return dict(model.state_dict(keep_vars=True))


def _finish(result: VerifyResult, device: str) -> VerifyResult:
    result.passed = all(gate.passed for gate in result.gates)
    if torch.device(device).type == "cuda":
        result.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB, on macOS in bytes
        result.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return result


@contextmanager
def _stage(result: VerifyResult, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        result.seconds[name] = round(time.perf_counter() - start, 3)


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more
