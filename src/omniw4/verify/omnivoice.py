"""Does a quantized OmniVoice decode what the original does? Greedy, prompt by prompt, step by step.

Two figures. *Agreement*: in every step of the original's decoding both models see the same codes; the share of those
still masked for which both would choose the same code, under guidance. *Match*: the quantized model decodes by itself,
from the first step to the last; the share of codes that come out the same. Agreement says how good each step is. Match
also says what becomes of a difference, which the later steps see: two runs that differ in one early code may both be
good.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from omniw4.runtime.omnivoice.packing import needed, pack
from omniw4.runtime.omnivoice.step import (
    DecodeState,
    Parts,
    Sampling,
    guided_log_probs,
    target_logits,
    unmask_best,
)
from omniw4.verify.decoding import DecodingCheck
from omniw4.verify.result import OnProgress, Progress


@dataclass(frozen=True)
class _Guided:
    """Greedy decoding of one model, a step at a time."""

    model: Any
    parts: Parts

    def state(self, task: Any, sampling: Sampling) -> DecodeState:
        inputs = self.model._prepare_inference_inputs(
            task.texts[0], task.target_lens[0], task.ref_texts[0], task.ref_audio_tokens[0], task.langs[0],
            task.instructs[0], True,
        )  # fmt: skip
        ids, audio, target = inputs["input_ids"][0], inputs["audio_mask"][0], task.target_lens[0]
        requests = [(ids.shape[1], target)]
        both = torch.cat([ids, ids[:, -target:]], 1), torch.cat([audio, audio[-target:]])
        base = self.model._prepare_embed_inputs(both[0][None], both[1][None])[0]
        size = needed(requests)
        state = DecodeState(size, self.parts.codebooks, sampling.num_step, base, self.parts.mask_id)
        state.load(pack(requests, self.parts.codebooks, size), base, [target], sampling)
        return state

    def log_probs(self, state: DecodeState) -> torch.Tensor:
        """``[N, V]`` float32, a row a cell."""
        found = guided_log_probs(target_logits(state, self.parts), state.guidance, self.parts.mask_id)
        return found.flatten(0, 1)[state.index["slot_of_cell"]]

    def unmask(self, state: DecodeState, log_probs: torch.Tensor) -> None:
        confidence, chosen = log_probs.max(-1)
        unmask_best(state, chosen, confidence - state.penalty)


@torch.inference_mode()
def check_decoding(
    original: nn.Module,
    quantized: nn.Module,
    tasks: Sequence[Any],
    *,
    num_step: int = 32,
    on_progress: OnProgress | None = None,
) -> DecodingCheck:
    """Decode the tasks, each of one prompt, with both models.

    Args:
        original, quantized: OmniVoices; the first with its tokenizer. Their own backbones run, not the engine.
        tasks: :func:`omniw4.calibrate.omnivoice.decoding_tasks` of the original.
    """
    sampling = Sampling(num_step=num_step, position_temperature=0.0)
    a, b = (_Guided(original, parts_of(model)) for model in (original, quantized))
    result = DecodingCheck(num_step, masked=[0] * num_step, agreed=[0] * num_step)
    started = time.perf_counter()
    for done, task in enumerate(tasks, start=1):
        shared, alone = a.state(task, sampling), b.state(task, sampling)
        for step in range(num_step):
            p, q = a.log_probs(shared), b.log_probs(shared)
            masked = shared.tokens == shared.mask_id
            result.masked[step] += int(masked.sum())
            result.agreed[step] += int((p.argmax(-1) == q.argmax(-1))[masked].sum())
            result.kl_sum += float(_kl(p, q)[masked].double().sum())
            a.unmask(shared, p)
            b.unmask(alone, b.log_probs(alone))
        same = shared.tokens == alone.tokens
        result.codes += same.numel()
        result.matched += int(same.sum())
        result.identical += bool(same.all())
        result.prompts += 1
        if on_progress is not None:
            eta = (time.perf_counter() - started) / done * (len(tasks) - done)
            on_progress(Progress("decode", done, len(tasks), task.texts[0][:40], eta))
    return result


def parts_of(model: Any) -> Parts:
    """A model's own backbone, called a sequence at a time."""

    def backbone(hidden: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        out = []
        for first, last in pairwise(cu_seqlens.tolist()):
            every = torch.ones(1, 1, last - first, last - first, dtype=torch.bool, device=hidden.device)
            call = model.llm(
                inputs_embeds=hidden[None, first:last], attention_mask=every, position_ids=positions[None, first:last]
            )
            out.append(call[0][0])
        return torch.cat(out)

    return Parts(
        model.audio_embeddings, model.codebook_layer_offsets, backbone, model.audio_heads, model.config.audio_mask_id
    )


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of log-probabilities ``[N, V]``, in which both have the same -inf."""
    return torch.where(p.isfinite(), p.exp() * (p - q), 0.0).sum(-1)
