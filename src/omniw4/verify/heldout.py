"""What the models are compared on: windows of text, or captured hidden states for a model that does not read text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from omniw4.calibrate.dataset import Bos, dataset_name, read_text, tokenize
from omniw4.calibrate.sources import HiddenSource, read_hidden
from omniw4.errors import DatasetError, UsageError
from omniw4.model import LoadedModel, check_positions, find_backbone, find_linears
from omniw4.verify.evaluate import Forward, Item, text_items
from omniw4.verify.windows import make_windows, spread

POLICIES = ("model", "always", "never")


@dataclass
class HeldOut:
    """Sequences, how to run a model on them, and what is recorded about them."""

    items: list[Item]
    forward: Callable[[nn.Module], Forward]
    record: dict[str, Any]
    bos: dict[str, Any]
    no_perplexity: str = ""  # why there is none; empty when there is one
    warnings: list[str] = field(default_factory=list)


def prepare(
    source: LoadedModel,
    dataset: str | None,
    count: int,
    seq_len: int,
    bos: str | None,
    calibration: dict[str, Any] | None,
    distillation: dict[str, Any] | None = None,
    captured: HiddenSource | None = None,
) -> HeldOut:
    """Choose the sequences for a model.

    Args:
        dataset: text as calibration takes it, or a ``.safetensors`` file of captured hidden states.
        captured: hidden states in place of a dataset.
        bos: "model", "always", "never", or None for the policy of the calibration.
        calibration: fingerprint stored in the checkpoint; None for a data-free recipe.
        distillation: what the checkpoint says it was trained on; None where it was not.

    Raises:
        DatasetError: nothing readable, a text too short for one window, or text for a model without a tokenizer.
        UsageError: an unknown BOS policy, or sequences longer than the model has positions.
    """
    if bos is not None and bos not in POLICIES:
        raise UsageError(f"unknown BOS policy {bos!r}", hint=f"--bos takes one of {', '.join(POLICIES)}")
    known = (calibration or {}).get("data", calibration) or {}
    if captured is not None:
        found = _from_hidden(source.model, captured, count, known)
    elif dataset is not None and Path(dataset).suffix == ".safetensors":
        found = _from_hidden(source.model, read_hidden(dataset), count, known)
    else:
        found = _from_text(source, dataset, count, seq_len, bos, known)
    trained = (distillation or {}).get("data", {})
    uses = [data for data, used in ((known, calibration), (trained, distillation)) if used is not None]
    found.record["held_out"] = is_held_out(found.record, uses)
    for key in ("text_sha256", "source_sha256"):
        if key in found.record:
            found.warnings += _same_text(trained.get(key), found.record[key], found.record["dataset"], "distillation")
    return found


def is_held_out(record: dict[str, Any], uses: list[dict[str, Any]]) -> bool | None:
    """Whether an evaluation's text is another than every text the checkpoint was made with.

    Args:
        record: of the evaluation, with the hash of its text or of its hidden states.
        uses: what the checkpoint says of its calibration and distillation; empty for a data-free recipe.

    Returns:
        None when that cannot be told: a use without a hash, or text compared with hidden states.
    """
    same: list[bool | None] = []
    for data in uses:
        keys = [key for key in ("text_sha256", "source_sha256") if data.get(key) and record.get(key)]
        same.append(any(data[key] == record[key] for key in keys) if keys else None)
    if True in same:
        return False
    return None if None in same else True


def _from_text(
    source: LoadedModel, dataset: str | None, count: int, seq_len: int, bos: str | None, known: dict[str, Any]
) -> HeldOut:
    if source.tokenizer is None:
        raise DatasetError(
            f"model {source.source!r} has no tokenizer, so text cannot be read into it",
            hint="give captured hidden states (.safetensors) with --dataset",
        )
    calibrated = known.get("bos", {})
    policy = bos or (calibrated.get("policy") if calibrated.get("policy") in POLICIES else "model")
    check_positions(source.model, seq_len)
    name, documents = dataset_name(dataset), read_text(dataset)
    # the one place that knows how a tokenizer treats BOS, and what identifies a text
    found = tokenize(documents, source.tokenizer, 1, seq_len, bos=cast("Bos", policy), name=name).fingerprint
    windows = make_windows(documents, source.tokenizer, count, seq_len, found["bos"]["token"])
    has_head = _output_embeddings(source.model) is not None
    return HeldOut(
        text_items(windows.ids, labelled=has_head),
        Forward if has_head else backbone_forward(source.model),
        {"dataset": name, "text_sha256": found["text_sha256"], **windows.record},
        _compare_bos(calibrated, found["bos"]),
        "" if has_head else f"{type(source.model).__name__} has no language head",
        [
            *windows.warnings,
            *_same_text(known.get("text_sha256"), found["text_sha256"], name),
            *_bos_warnings(calibrated, found["bos"]),
        ],
    )


def _from_hidden(model: nn.Module, hidden: HiddenSource, count: int, known: dict[str, Any]) -> HeldOut:
    backbone = find_backbone(model)[1]
    check_positions(model, hidden.hidden_states.shape[1])
    fitting = min(count, len(hidden))
    chosen = spread(len(hidden), 1, fitting)
    items = []
    for index in chosen:
        batch = hidden.batch(index, index + 1, backbone)
        items.append(Item({**batch.inputs, "use_cache": False}, batch.mask[0]))
    name = hidden.fingerprint["dataset"]
    record = {
        "dataset": name,
        "source_sha256": hidden.fingerprint["source_sha256"],
        "asked": count,
        "count": fitting,
        "seq_len": hidden.hidden_states.shape[1],
        "samples": chosen,
    }
    warnings = _same_text(known.get("source_sha256"), hidden.fingerprint["source_sha256"], name)
    if fitting < count:
        warnings.append(f"{name!r} holds {fitting} of the {count} sequences asked for")
    bos = _compare_bos(known.get("bos", {}), hidden.fingerprint["bos"])
    return HeldOut(items, backbone_forward(model), record, bos, "captured hidden states carry no labels", warnings)


def backbone_forward(original: nn.Module) -> Callable[[nn.Module], Forward]:
    """How to run the repeated blocks alone, then the model's heads when one linear alone reads their output.

    Args:
        original: tells where the backbone and the heads are; in the quantized model the blocks hold no ``nn.Linear``
            that could tell.
    """
    path, backbone = find_backbone(original)
    width = getattr(getattr(backbone, "config", None), "hidden_size", None)
    prefix = f"{path}." if path else ""
    heads = [
        name
        for name, linear in find_linears(original).items()
        if prefix and not name.startswith(prefix) and linear.in_features == width
    ]
    codebooks = getattr(getattr(original, "config", None), "num_audio_codebook", 1)

    def forward(model: nn.Module) -> Forward:
        head = model.get_submodule(heads[0]) if len(heads) == 1 else None
        return Forward(model.get_submodule(path), head, codebooks)

    return forward


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _compare_bos(calibration: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    """Both policies with their tokens; ``same`` is None where there is nothing to compare."""
    comparable = calibration.get("policy") in POLICIES and evaluation.get("policy") in POLICIES
    same = calibration["token"] == evaluation["token"] if comparable else None
    return {"calibration": calibration or None, "evaluation": evaluation, "same": same}


def _bos_warnings(calibration: dict[str, Any], evaluation: dict[str, Any]) -> list[str]:
    if _compare_bos(calibration, evaluation)["same"] is not False:
        return []
    began = ["begin with BOS" if bos["token"] is not None else "begin without BOS" for bos in (calibration, evaluation)]
    return [f"calibration sequences {began[0]}, evaluation windows {began[1]}"]


def _same_text(known: str | None, evaluation: str, name: str, use: str = "calibration") -> list[str]:
    if known != evaluation:
        return []
    return [f"{name!r} is the text of the {use}: these figures are not held-out; name another with --dataset"]
