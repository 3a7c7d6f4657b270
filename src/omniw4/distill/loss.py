"""How far the student's outputs are from the teacher's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omniw4.errors import ModelError

SLICE = 512  # rows of logits whose FP32 log-probabilities exist at a time


def outputs_of(result: Any, keep: torch.Tensor | None) -> tuple[str, torch.Tensor]:
    """What a forward said about the counted positions: its logits, or the last hidden state of a headless model.

    Args:
        result: what a Hugging Face model returned.
        keep: ``[B, L]`` bool; None counts every position, without waiting for a GPU to say which.

    Returns:
        ``"logits"`` and ``[T, V]``, or ``"hidden"`` and ``[T, H]``.

    Raises:
        ModelError: neither is there.
    """
    for kind, name in (("logits", "logits"), ("hidden", "last_hidden_state")):
        found = getattr(result, name, None)
        if found is not None:
            return kind, found.flatten(0, 1) if keep is None else found[keep]
    raise ModelError(f"{type(result).__name__} holds neither logits nor a last hidden state")


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean over rows of ``KL(teacher ‖ student)`` in nats, from logits ``[T, V]``; differentiable in ``student``."""
    total = student.new_zeros((), dtype=torch.float32)
    for p, q in zip(teacher.split(SLICE), student.split(SLICE), strict=True):
        total = total + checkpoint(_kl_sum, p, q, use_reentrant=False, preserve_rng_state=False)
    return total / student.shape[0]


def relative_error(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """``‖student - teacher‖² / ‖teacher‖²`` of hidden states ``[T, H]``, each row weighing the same."""
    error = (student.float() - teacher.float()).square().sum(-1)
    return (error / teacher.float().square().sum(-1).clamp(min=1e-20)).mean()


def distance(kind: str, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL for logits, relative squared error for hidden states."""
    return kl(teacher, student) if kind == "logits" else relative_error(teacher, student)


def _kl_sum(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    p = F.log_softmax(p_logits.float(), dim=-1)
    q = F.log_softmax(q_logits.float(), dim=-1)
    return F.kl_div(q, p, reduction="sum", log_target=True)
