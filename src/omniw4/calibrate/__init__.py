"""Calibration: text in, statistics of every linear's input out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omniw4.calibrate.capture import capture
from omniw4.calibrate.dataset import TokenSet, dataset_name, read_text, tokenize
from omniw4.calibrate.omnivoice import capture_decoding
from omniw4.calibrate.own_text import OwnText, sample_tokens, write_text
from omniw4.calibrate.prompts import read_prompts
from omniw4.calibrate.relay import Relay
from omniw4.calibrate.sources import HiddenSource, TokenSource, read_hidden
from omniw4.calibrate.stats import Stats, StatsWriter
from omniw4.calibrate.walk import Resident
from omniw4.errors import ModelError
from omniw4.model import LoadedModel, check_positions, find_backbone

__all__ = [
    "HiddenSource",
    "OwnText",
    "Relay",
    "Stats",
    "TokenSet",
    "calibrate",
    "capture",
    "capture_decoding",
    "contribute",
    "dataset_name",
    "fingerprint",
    "read_hidden",
    "read_prompts",
    "read_text",
    "sample_tokens",
    "tokenize",
    "write_text",
]


def calibrate(
    loaded: LoadedModel,
    data: TokenSet | HiddenSource,
    folder: str | Path,
    *,
    batch_size: int = 1,
    on_block: Callable[[int, int, str], None] | None = None,
    resident: Resident | None = None,
    relay: Relay | None = None,
    through: dict[str, Any] | None = None,
) -> Stats:
    """Capture the statistics of a model and write them to an existing, empty folder.

    Args:
        data: from :func:`tokenize` or :func:`read_hidden`.
        batch_size: samples a forward.
        on_block: called after each block with (blocks done, blocks, path of the block).
        resident: makes a block ready while it is run: brings it into memory (:func:`omniw4.model.offload`), or lets
            quantized linears stand in for its own (:func:`omniw4.runtime.stand_in.stand_in_by_block`).
        relay: processes that share the samples, this one being the last of them; the others :func:`contribute`.
        through: what stands in, for the fingerprint; None: the model as it is.

    Raises:
        UsageError: sequences longer than the model has positions.
        ModelError: the data do not fit the model, or the model cannot be walked block by block.
        NonFiniteError: more than 10 % of the rows that reach a linear hold NaN or inf.
        StorageError: the folder cannot be written.
    """
    import transformers

    import omniw4

    _check_fit(loaded, data)
    provenance = {
        "omniw4": getattr(omniw4, "__version__", "unknown"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batch_size": batch_size,
        "warnings": data.warnings,
    }
    source = TokenSource(data) if isinstance(data, TokenSet) else data
    with StatsWriter(folder, fingerprint(loaded, data, through), provenance) as sink:
        capture(loaded.model, source, sink, batch_size=batch_size, on_block=on_block, resident=resident, relay=relay)
    return Stats.open(folder)


def contribute(
    loaded: LoadedModel,
    data: TokenSet | HiddenSource,
    relay: Relay,
    *,
    batch_size: int = 1,
    resident: Resident | None = None,
) -> None:
    """The part of :func:`calibrate` of a process that is not the last: its sums go to the one behind it."""
    _check_fit(loaded, data)
    source = TokenSource(data) if isinstance(data, TokenSet) else data
    capture(loaded.model, source, None, batch_size=batch_size, resident=resident, relay=relay)


def fingerprint(
    loaded: LoadedModel, data: TokenSet | HiddenSource, through: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What decides the statistics: model, data, the dtype the model ran in, and what stood in for its linears."""
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    name = loaded.folder.name if loaded.folder is not None else loaded.source
    found = {"model": {"name": name, "hash": loaded.hash}, "data": data.fingerprint, "dtype": dtype}
    return found if through is None else found | {"through": through}


def _check_fit(loaded: LoadedModel, data: TokenSet | HiddenSource) -> None:
    """An index outside the embedding, or a wrong width, would end in an error without a name deep in the model."""
    check_positions(loaded.model, (data.tokens if isinstance(data, TokenSet) else data.hidden_states).shape[1])
    _, backbone = find_backbone(loaded.model)
    config = getattr(backbone, "config", None)
    if isinstance(data, TokenSet):
        vocabulary = getattr(config, "vocab_size", None)
        largest = int(data.tokens.max())
        if vocabulary is not None and largest >= vocabulary:
            raise ModelError(
                f"token {largest} of the tokenizer is outside the model's vocabulary of {vocabulary}",
                hint="the tokenizer is of another model: copy that of this one into the model folder",
            )
    else:
        width, found = getattr(config, "hidden_size", None), data.hidden_states.shape[-1]
        if width is not None and found != width:
            raise ModelError(
                f"hidden states of the source are {found} wide, the model's backbone is {width}",
                hint="capture them from the model that is calibrated",
            )
