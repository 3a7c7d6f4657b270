"""Which model a checkpoint was made from, and whether a model that is given beside it is that one."""

from __future__ import annotations

from omniw4.checkpoint.reader import Checkpoint
from omniw4.errors import ModelError


def other_origin(checkpoint: Checkpoint, name: str, model_hash: str) -> str:
    """One sentence on how a model differs from the one the checkpoint was made from; empty when it is the same.

    Args:
        name: what the user calls the model.
        model_hash: its :func:`omniw4.model.source_hash`.
    """
    recorded = checkpoint.provenance["source"]
    if recorded.get("hash", "") == model_hash:
        return ""
    return f"the checkpoint was made from {recorded.get('name')!r} with other files than {name!r} holds now"


def require_origin(checkpoint: Checkpoint, name: str, model_hash: str) -> None:
    """Refuse to compare a checkpoint with a model it was not made from; raises ModelError."""
    if told := other_origin(checkpoint, name, model_hash):
        raise ModelError(
            f"{told}, so that comparing them says nothing",
            hint="give the model that the checkpoint was made from, as it was then",
        )
