"""Attention over packed sequences: one interface, several providers, the fastest that runs chosen once.

Every provider takes ``qkv [P, (Hq + 2·Hkv)·D]``, queries, keys and values of a token side by side, with
``cu_seqlens [B + 1]`` int32, and returns ``[P, Hq·D]``. Query head h attends to key head ``h // (Hq / Hkv)``.

==============  ======================================================================================
``kernel``      the op ``attention_varlen``, where its kernel is compiled for the GPU; on a CPU its reference
``varlen``      ``torch.nn.attention.varlen``, where torch has it
``sdpa``        scaled_dot_product_attention with a block-diagonal mask: any GPU, any torch, slow
``sdpa-loop``   one call a sequence; reads cu_seqlens on the host, so on a CPU only
==============  ======================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from omniw4 import ops
from omniw4.errors import UsageError


@dataclass(frozen=True)
class AttentionSpec:
    """Heads, and who attends to whom."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    scale: float

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of queries ``[P, Hq, D]``, keys and values ``[P, Hkv, D]``."""
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return q, k, v


@dataclass(frozen=True)
class Provider:
    """A named way to attend; calling it attends."""

    name: str
    spec: AttentionSpec
    function: Callable[[AttentionSpec, torch.Tensor, torch.Tensor, int], torch.Tensor]

    def __call__(self, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return self.function(self.spec, qkv, cu_seqlens, max_seqlen)


def sdpa_loop(spec: AttentionSpec, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """A sequence's result depends on nothing but the sequence: what is called for it has its shape alone."""
    q, k, v = (heads.transpose(0, 1) for heads in spec.split(qkv))  # [heads, P, D]
    out = qkv.new_zeros(spec.num_heads, qkv.shape[0], spec.head_dim)
    ends = cu_seqlens.tolist()
    for first, last in pairwise(ends):
        if last > first:
            out[:, first:last] = _sdpa(spec, q[:, first:last], k[:, first:last], v[:, first:last])
    return out.transpose(0, 1).reshape(qkv.shape[0], -1)


def sdpa_mask(spec: AttentionSpec, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """All tokens in one call; a mask keeps sequences apart."""
    q, k, v = (heads.transpose(0, 1) for heads in spec.split(qkv))
    index = torch.arange(qkv.shape[0], device=qkv.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, index, right=True)
    mask = sequence[:, None] == sequence[None, :]  # [P, P]
    if spec.causal:
        mask = mask & (index[:, None] >= index[None, :])
    out = _sdpa(spec, q, k, v, mask)
    return out.transpose(0, 1).reshape(qkv.shape[0], -1)


def _sdpa(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=spec.causal and mask is None, scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )  # fmt: skip
    return out[0]


def kernel(spec: AttentionSpec, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """This package's own, which leaves the rows of no sequence as the allocator gives them: nobody reads them."""
    out = qkv.new_empty(qkv.shape[0], spec.num_heads * spec.head_dim)
    ops.attention_varlen_out(
        qkv, cu_seqlens, max_seqlen, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.causal, spec.scale, out
    )
    return out


def varlen(spec: AttentionSpec, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """``torch.nn.attention.varlen``; the kernels under it share key heads among query heads by themselves."""
    q, k, v = spec.split(qkv)
    out = _varlen_attn()(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **_varlen_options(spec))
    return out.reshape(qkv.shape[0], -1)


def _varlen_attn() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _varlen_options(spec: AttentionSpec) -> dict[str, Any]:
    """Its arguments have changed names between versions of torch."""
    known = inspect.signature(_varlen_attn()).parameters
    options: dict[str, Any] = {"scale": spec.scale} if "scale" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1, 0) if spec.causal else (-1, -1)
    elif "is_causal" in known:
        options["is_causal"] = spec.causal
    if "enable_gqa" in known:
        options["enable_gqa"] = spec.num_heads != spec.num_kv_heads
    return options


_PROVIDERS: dict[str, Callable[[AttentionSpec, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "kernel": kernel,
    "varlen": varlen,
    "sdpa": sdpa_mask,
    "sdpa-loop": sdpa_loop,
}


def choose(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, name: str | None = None) -> Provider:
    """The provider of that name, or the first in the order of the table above that works on the device.

    Each candidate is tried on a few tokens; what raises there is passed over.

    Raises:
        UsageError: an unknown name, or a named provider that does not run here, with what it said.
    """
    if name is not None and name not in _PROVIDERS:
        raise UsageError(f"no attention provider {name!r}", hint=f"there are {', '.join(_PROVIDERS)}")
    if device.type == "cpu":
        return Provider(name or "sdpa-loop", spec, _PROVIDERS[name or "sdpa-loop"])
    failures = []
    for candidate in [name] if name else [n for n in _PROVIDERS if n != "sdpa-loop"]:
        provider = Provider(candidate, spec, _PROVIDERS[candidate])
        if candidate == "kernel" and not ops.attention_kernel_runs(device, spec.head_dim):
            failures.append(f"{candidate}: not compiled for this GPU and heads of {spec.head_dim}")
            continue
        try:
            _probe(provider, device, dtype)
        except Exception as e:
            failures.append(f"{candidate}: {' '.join(str(e).split())[:120]}")
            continue
        return provider
    raise UsageError(f"no attention provider runs on {device}: {'; '.join(failures)}")


def _probe(provider: Provider, device: torch.device, dtype: torch.dtype) -> None:
    spec = provider.spec
    features = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.zeros(32, features, device=device, dtype=dtype)
    provider(qkv, torch.tensor([0, 20, 32, 32], device=device, dtype=torch.int32), 32)
    torch.cuda.synchronize(device)
