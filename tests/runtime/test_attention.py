"""Attention providers agree with each other and keep sequences apart."""

from __future__ import annotations

import pytest
import torch

from omniw4.runtime import attention
from problems import assert_same, relative_error

CPU = torch.device("cpu")
ENDS = torch.tensor([0, 13, 14, 14, 40], dtype=torch.int32)


def spec(heads: int, kv_heads: int, head_dim: int, causal: bool) -> attention.AttentionSpec:
    return attention.AttentionSpec(heads, kv_heads, head_dim, causal, head_dim**-0.5)


def exact(s: attention.AttentionSpec, qkv: torch.Tensor) -> torch.Tensor:
    """In FP64, one sequence and head at a time."""
    q, k, v = s.split(qkv.double())
    out = torch.zeros(qkv.shape[0], s.num_heads, s.head_dim, dtype=torch.float64)
    for first, last in zip(ENDS[:-1].tolist(), ENDS[1:].tolist(), strict=True):
        for head in range(s.num_heads):
            shared = head // (s.num_heads // s.num_kv_heads)
            scores = q[first:last, head] @ k[first:last, shared].T * s.scale
            if s.causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
            out[first:last, head] = scores.softmax(-1) @ v[first:last, shared]
    return out.flatten(1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (4, 4, 64), (3, 1, 128)])
@pytest.mark.parametrize("name", ["sdpa-loop", "sdpa", "kernel"])
def test_against_fp64(name: str, heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    s = spec(heads, kv_heads, head_dim, causal)
    qkv = torch.randn(40, (heads + 2 * kv_heads) * head_dim, generator=torch.Generator().manual_seed(0))
    provider = attention.choose(s, CPU, torch.float32, name)
    assert provider.name == name
    assert relative_error(provider(qkv, ENDS, 40), exact(s, qkv)) < 1e-6


@pytest.mark.parametrize("name", ["sdpa-loop", "sdpa", "kernel"])
def test_a_sequence_does_not_see_another(name: str) -> None:
    s = spec(4, 2, 32, False)
    qkv = torch.randn(40, 8 * 32, generator=torch.Generator().manual_seed(0))
    provider = attention.choose(s, CPU, torch.float32, name)
    before = provider(qkv, ENDS, 40)
    qkv[14:] = 1e4
    after = provider(qkv, ENDS, 40)
    assert_same(after[:14], before[:14], "the other sequences")
    assert not torch.equal(after[14:], before[14:])


def test_tokens_of_no_sequence_are_harmless() -> None:
    s = spec(2, 1, 32, False)
    qkv = torch.randn(10, 4 * 32, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    for name in ("sdpa-loop", "sdpa"):
        provider = attention.choose(s, CPU, torch.float32, name)
        assert relative_error(provider(qkv, ends, 10)[:7], provider(qkv[:7], ends, 7)) < 1e-6


def test_the_default_on_a_cpu() -> None:
    assert attention.choose(spec(2, 1, 32, False), CPU, torch.float32).name == "sdpa-loop"
