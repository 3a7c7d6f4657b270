"""One step of OmniVoice's iterative decoding on packed rows, with nothing for the host to wait for.

The target's codes start masked. A step shows the backbone what is unmasked so far, scores every code of the target
with classifier-free guidance, and unmasks the best of those still masked: how many, the schedule says. Everything a
step reads or changes is in :class:`DecodeState`, whose tensors never move, so that a step can be captured in a CUDA
graph and replayed.

Source: OmniVoice (the package omnivoice, ``_generate_iterative``); MaskGIT, arXiv 2202.04200; Gumbel noise on the
scores draws positions in proportion to their confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omniw4.runtime.omnivoice.packing import Packing, Size, unmasking_schedule

Backbone = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # hidden [P, H], positions, cu_seqlens

_TINY = 1e-10
_CLASS_SHARE = 0.1  # of the vocabulary, drawn from when codes are sampled


@dataclass(frozen=True)
class Sampling:
    """The settings of ``OmniVoiceGenerationConfig`` that decoding reads."""

    num_step: int = 32
    guidance_scale: float = 2.0
    t_shift: float = 0.1
    layer_penalty_factor: float = 5.0
    position_temperature: float = 5.0
    class_temperature: float = 0.0

    @property
    def guided(self) -> bool:
        return self.guidance_scale != 0


@dataclass(frozen=True)
class Parts:
    """What a step needs of an OmniVoice: codes to hidden states, the backbone, hidden states to logits."""

    embedding: nn.Embedding  # [C·V, H]
    offsets: torch.Tensor  # [C] int64, where a codebook begins in it
    backbone: Backbone
    heads: nn.Linear  # [C·V, H]
    mask_id: int

    @property
    def codebooks(self) -> int:
        return len(self.offsets)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes ``[T, C]`` int64 to hidden states ``[T, H]``: the sum over codebooks."""
        return self.embedding(codes + self.offsets).sum(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, H]`` to ``[n, C, V]``, in the dtype of the heads."""
        return self.heads(hidden).view(len(hidden), self.codebooks, -1)


class DecodeState:
    """The tensors of a batch in decoding; N = C·T cells of ``size`` (:mod:`omniw4.runtime.omnivoice.packing`).

    Args:
        size: the batches it takes.
        steps: the longest schedule it takes.
        template: any hidden states, for their width, dtype and device.
    """

    def __init__(self, size: Size, codebooks: int, steps: int, template: torch.Tensor, mask_id: int) -> None:
        device, cells = template.device, codebooks * size.targets
        self.size, self.steps, self.mask_id = size, steps, mask_id
        self.index: dict[str, torch.Tensor] = {}
        self.base = template.new_zeros(size.tokens, template.shape[-1])  # [P, H]; rows of targets are not read
        self.tokens = torch.full((cells,), mask_id, device=device)  # [N] int64
        self.quota = torch.zeros(steps, size.requests + 1, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.penalty = torch.zeros(cells, device=device)  # [N] float32, taken off a cell's score
        self.guidance = torch.zeros((), device=device)
        self.temperature = torch.ones((), device=device)
        self.noise = torch.zeros((), device=device)  # 1: Gumbel noise on the scores, 0: none

    def load(self, packing: Packing, base: torch.Tensor, targets: Sequence[int], sampling: Sampling) -> None:
        """Put a batch in, all of its targets masked.

        Args:
            base: ``[tokens, H]`` embeddings of the packed rows.
            targets: target positions of each request.
        """
        device = self.tokens.device
        for name, tensor in packing.tensors().items():
            if name in self.index:
                self.index[name].copy_(tensor, non_blocking=True)
            else:
                self.index[name] = tensor.to(device)
        self.base[: len(base)].copy_(base)
        self.base[len(base) :].zero_()
        self.tokens.fill_(self.mask_id)
        codebooks = len(self.tokens) // self.size.targets
        quota = torch.zeros_like(self.quota, device="cpu")
        for request, target in enumerate(targets):
            schedule = unmasking_schedule(codebooks * target, sampling.num_step, sampling.t_shift)
            quota[: sampling.num_step, request] = torch.tensor(schedule)
        self.quota.copy_(quota, non_blocking=True)
        self.step.zero_()
        torch.mul(self.index["codebook"], sampling.layer_penalty_factor, out=self.penalty)
        self.guidance.fill_(sampling.guidance_scale)
        self.noise.fill_(float(sampling.position_temperature > 0))
        self.temperature.fill_(sampling.position_temperature if sampling.position_temperature > 0 else 1.0)

    def codes(self, targets: Sequence[int]) -> list[torch.Tensor]:
        """What is decoded, ``[C, t]`` int64 of each request; new tensors."""
        codebooks = len(self.tokens) // self.size.targets
        parts = self.tokens[: codebooks * sum(targets)].clone().split([codebooks * target for target in targets])
        return [part.view(codebooks, -1) for part in parts]


def backbone_input(state: DecodeState, parts: Parts) -> torch.Tensor:
    """Hidden states ``[P, H]``: the batch as it is, with the codes unmasked so far in both rows of a target."""
    shown = parts.embed(state.tokens[state.index["cell_of_slot"]])  # [T, H]
    return torch.where(state.index["is_target"][:, None], shown[state.index["target_of_row"]], state.base)


def target_logits(state: DecodeState, parts: Parts) -> torch.Tensor:
    """Conditional and unconditional logits of the targets, ``[2, T, C, V]``."""
    index = state.index
    hidden = parts.backbone(backbone_input(state, parts), index["positions"], index["cu_seqlens"])
    logits = parts.logits(hidden[torch.cat([index["conditional"], index["unconditional"]])])
    return logits.view(2, -1, *logits.shape[1:])


def guided_log_probs(logits: torch.Tensor, guidance: torch.Tensor, mask_id: int) -> torch.Tensor:
    """Log-probabilities ``[T, C, V]`` float32 of ``[2, T, C, V]`` under guidance; that of the mask itself is -inf.

    Few passes over few tensors: 16-bit logits become float32 inside the first softmax, and the guided ones take the
    place of the unconditional ones.
    """
    conditional, other = F.log_softmax(logits, -1, dtype=torch.float32)
    torch.sub(conditional, other, out=other)
    torch.addcmul(conditional, other, guidance, out=other)  # c + (c - u)·guidance
    return without_mask(F.log_softmax(other, -1), mask_id)


def without_mask(log_probs: torch.Tensor, mask_id: int) -> torch.Tensor:
    log_probs[..., mask_id] = -torch.inf
    return log_probs


def unmask_best(state: DecodeState, chosen: torch.Tensor, scores: torch.Tensor) -> None:
    """Give the best-scored masked cells of each request, as many as this step's quota, their chosen code.

    Args:
        chosen: ``[N]`` int64, a code for every cell.
        scores: ``[N]`` float32; of equal ones the earlier cell comes first.
    """
    index = state.index
    scores = scores.masked_fill(state.tokens != state.mask_id, -torch.inf)
    # requests first, then scores from high to low: a float's bits, negative ones flipped, sort as integers
    bits = scores.view(torch.int32).long()
    key = (index["owner"] << 33) - torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = key.argsort(stable=True)  # sorted place j holds a cell of the same request as cell j
    quota = state.quota.index_select(0, state.step)[0]
    picked = torch.empty_like(order, dtype=torch.bool)
    picked[order] = index["rank"] < quota[index["owner"]]
    state.tokens.copy_(torch.where(picked, chosen, state.tokens))
    state.step.add_(1)


def decode_step(state: DecodeState, parts: Parts) -> None:
    """One step with greedy codes; the same work whatever the batch in ``state``, so that it can be captured."""
    slots = state.index["slot_of_cell"]
    log_probs = guided_log_probs(target_logits(state, parts), state.guidance, parts.mask_id)
    confidence, chosen = log_probs.max(-1)  # [T, C]
    scores = (confidence.view(-1)[slots] - state.penalty) / state.temperature
    unmask_best(state, chosen.view(-1)[slots], scores + state.noise * gumbel(scores))


def decode_step_free(state: DecodeState, parts: Parts, sampling: Sampling) -> None:
    """One step with any settings; draws no random number that the settings do not ask for."""
    slots = state.index["slot_of_cell"]
    logits = target_logits(state, parts)
    if sampling.guided:
        log_probs = guided_log_probs(logits, state.guidance, parts.mask_id)
    else:
        log_probs = without_mask(F.log_softmax(logits[0], -1, dtype=torch.float32), parts.mask_id)
    log_probs = log_probs.flatten(0, 1)[slots]  # [N, V]
    confidence, chosen = log_probs.max(-1)
    if sampling.class_temperature > 0:
        chosen = sample_codes(log_probs, sampling.class_temperature)
    scores = confidence - state.penalty
    if sampling.position_temperature > 0:
        scores = scores / sampling.position_temperature
        scores = scores + gumbel(scores)
    unmask_best(state, chosen, scores)


def sample_codes(log_probs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Draw a code ``[N]`` from each row's most likely tenth of the vocabulary, by the Gumbel-max trick."""
    best, codes = log_probs.topk(math.ceil(_CLASS_SHARE * log_probs.shape[-1]), dim=-1)
    kept = torch.full_like(log_probs, -torch.inf).scatter_(-1, codes, best)
    scaled = kept / temperature
    return (scaled + gumbel(scaled)).argmax(-1)


def gumbel(like: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of the shape of ``like``, from its device's generator."""
    return -torch.log(-torch.log(torch.rand_like(like) + _TINY) + _TINY)


def sampling_of(generation_config: Any) -> Sampling:
    """The part of the package's generation config that decoding reads."""
    return Sampling(**{name: getattr(generation_config, name) for name in Sampling.__dataclass_fields__})
