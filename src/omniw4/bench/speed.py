"""How fast the fused engine runs the backbone of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from omniw4.bench.backbone import CALLS, SEQUENCES, packed_inputs
from omniw4.bench.timing import REPETITIONS, WARMUP, measure_eager
from omniw4.checkpoint.reader import Checkpoint
from omniw4.errors import ModelError
from omniw4.ops import CANONICAL, kernel_layout
from omniw4.runtime.engine import Qwen3Engine

TOKENS = 512


def backbone_milliseconds(folder: str | Path, device: torch.device | str, tokens: int = TOKENS) -> float | None:
    """Milliseconds of one forward of a checkpoint's backbone, all of its layers and the final norm, in FP16.

    The tokens are packed, two sequences of half of them; a causal LM attends causally, an OmniVoice both ways. The
    engine replays a CUDA graph, several forwards one behind the other between two events; the median of the samples.

    Returns:
        None where no kernels for the checkpoint's linears are compiled for the device, as on a CPU.

    Raises:
        ModelError: the engine does not run this model: no Qwen3, or one of fewer positions.
        CheckpointError: a damaged tensor, by name.
    """
    device = torch.device(device)
    checkpoint = Checkpoint.open(folder)
    quantized = [spec for spec in checkpoint.specs.values() if spec.act_bits != 16]
    if not quantized or any(kernel_layout(device, s.act_bits, s.scale_type) == CANONICAL for s in quantized):
        return None
    engine = Qwen3Engine.from_checkpoint(
        checkpoint, backend="w4a4", device=device, causal="llm_config" not in checkpoint.config, buckets=(tokens,),
        max_sequences=SEQUENCES,
    )  # fmt: skip
    if engine.config.max_positions < tokens // SEQUENCES:
        raise ModelError(f"the model has {engine.config.max_positions} positions, wanted {tokens // SEQUENCES}")
    inputs = packed_inputs(tokens, engine.config.hidden_size, device, engine.dtype)
    with torch.inference_mode():
        timing = measure_eager([lambda: engine(*inputs)] * CALLS, device, warmup=WARMUP, repetitions=REPETITIONS)
    return timing.median / 1e3
