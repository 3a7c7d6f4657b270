"""The file an interrupted distillation goes on from: parameters, the optimizer's moments, the best state, the log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from omniw4.errors import ResumeError
from omniw4.storage import TensorFileWriter

FILE = "distillation.safetensors"


@dataclass
class State:
    """Everything the loop changes.

    ``tensors`` holds ``now.<name>`` (parameters), ``best.<name>`` (those of the best step), ``mean.<name>`` and
    ``square.<name>`` (AdamW's moments), all FP32.
    """

    step: int = 0
    best_step: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def write(folder: str | Path, state: State) -> None:
    """Replace the state in ``folder``, whole or not at all; raises StorageError."""
    layout = {name: (t.dtype, t.shape) for name, t in state.tensors.items()}
    metadata = {"step": str(state.step), "best_step": str(state.best_step), "log": json.dumps(state.log)}
    with TensorFileWriter(Path(folder) / FILE, layout, metadata) as out:
        for name, tensor in state.tensors.items():
            out.write(name, tensor.cpu())


def read(folder: str | Path, parameters: Mapping[str, torch.Tensor]) -> State | None:
    """The state in ``folder``, or None when there is none.

    Raises:
        ResumeError: it is damaged, or of other parameters.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = State(int(metadata["step"]), int(metadata["best_step"]), json.loads(metadata["log"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ResumeError(f"{FILE} of the interrupted run is damaged", hint="start again with --overwrite") from e
    for kind in ("now", "best", "mean", "square"):
        shapes = {n.removeprefix(f"{kind}."): t.shape for n, t in tensors.items() if n.startswith(f"{kind}.")}
        if shapes != {name: p.shape for name, p in parameters.items()}:
            raise ResumeError(f"{FILE} of the interrupted run is of other linears", hint="start again with --overwrite")
    return state
