"""attention_varlen against torch's own attention, sequence by sequence, and its promises about rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, relative_error

HEADS = [(16, 8, 128), (4, 4, 64), (6, 2, 32), (3, 1, 64)]
LENGTHS = (5, 0, 17, 1, 33)
Heads = tuple[int, int, int]


def pack(
    lengths: tuple[int, ...], heads: Heads, dtype: torch.dtype, spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv of the sequences and ``spare`` rows of NaN behind them, and their boundaries."""
    rows, (q_heads, kv_heads, head_dim) = sum(lengths), heads
    qkv = torch.randn(rows + spare, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    qkv[rows:] = float("nan")
    return qkv, torch.tensor([0, *lengths]).cumsum(0).int()


def attend(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, heads: Heads, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    return ops.attention_varlen(qkv, cu_seqlens, qkv.shape[0], *heads, causal, scale or heads[2] ** -0.5)


def torch_attention(
    qkv: torch.Tensor, lengths: tuple[int, ...], heads: Heads, causal: bool, scale: float | None = None
) -> torch.Tensor:
    """scaled_dot_product_attention over each sequence alone, in the dtype of qkv."""
    q_heads, kv_heads, head_dim = heads
    out = []
    for rows in qkv[: sum(lengths)].split(lengths):
        q, k, v = rows.unflatten(1, (-1, head_dim)).transpose(0, 1).split((q_heads, kv_heads, kv_heads))
        k, v = (t.repeat_interleave(q_heads // kv_heads, 0) for t in (k, v))
        found = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal, scale=scale)[0]
        out.append(found.transpose(0, 1).flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_at_most_twice_the_error_of_torch(heads: Heads, causal: bool, dtype: torch.dtype) -> None:
    qkv, cu_seqlens = pack(LENGTHS, heads, dtype)
    exact = torch_attention(qkv.double(), LENGTHS, heads, causal, 0.2)
    plain = torch_attention(qkv, LENGTHS, heads, causal, 0.2)
    assert relative_error(attend(qkv, cu_seqlens, heads, causal, 0.2), exact) <= 2 * relative_error(plain, exact)


@pytest.mark.parametrize("causal", [False, True])
def test_more_rows_than_the_reference_takes_at_a_time(causal: bool) -> None:
    heads, lengths = (2, 1, 8), (1100, 3)
    qkv, cu_seqlens = pack(lengths, heads, torch.float64)
    found = ops.attention_varlen_ref(qkv.float(), cu_seqlens, 1100, *heads, causal, 8**-0.5, compute=torch.float64)
    assert relative_error(found, torch_attention(qkv.float().double(), lengths, heads, causal)) < 1e-6


def test_a_sequence_is_the_same_alone_and_among_others() -> None:
    heads = (4, 2, 64)
    qkv, cu_seqlens = pack(LENGTHS, heads, torch.bfloat16, spare=3)
    together = attend(qkv, cu_seqlens, heads)
    for first, last in pairwise(cu_seqlens.tolist()):
        alone = attend(qkv[first:last].clone(), torch.tensor([0, last - first], dtype=torch.int32), heads)
        assert_same(together[first:last], alone, f"rows {first} to {last}")
    qkv[:5] = float("nan")
    assert_same(attend(qkv, cu_seqlens, heads)[5:], together[5:], "with NaN in another sequence")


def test_rows_of_no_sequence_are_zero() -> None:
    heads = (2, 1, 16)
    qkv, _ = pack((20,), heads, torch.float16, spare=4)
    found = attend(qkv, torch.tensor([3, 9, 20], dtype=torch.int32), heads)
    assert not found[:3].any()
    assert not found[20:].any()
    assert found[3:20].isfinite().all()
    assert found[3:20].any(1).all()
    assert not attend(qkv, torch.tensor([5], dtype=torch.int32), heads).any()


def test_later_tokens_do_not_matter_to_a_causal_one() -> None:
    heads = (4, 2, 32)
    qkv, cu_seqlens = pack((40,), heads, torch.float32)
    found = attend(qkv, cu_seqlens, heads, causal=True)
    qkv[30:] = torch.randn_like(qkv[30:])
    assert_same(attend(qkv, cu_seqlens, heads, causal=True)[:30], found[:30], "the first 30 tokens")
    assert_same(found[0], qkv[0].unflatten(0, (-1, 32))[6:].repeat_interleave(2, 0).flatten(), "the first token")


def test_the_given_output_gets_the_same_bits() -> None:
    heads = (4, 2, 64)
    qkv, cu_seqlens = pack(LENGTHS, heads, torch.float16, spare=2)
    wide = torch.full((58, 300), float("nan"), dtype=torch.float16)
    out = wide[:, 20:276]
    ops.attention_varlen_out(qkv, cu_seqlens, 33, *heads, False, 0.125, out)
    assert_same(out, attend(qkv, cu_seqlens, heads), "out")
    assert wide[:, :20].isnan().all()
    assert wide[:, 276:].isnan().all()


def test_no_tokens() -> None:
    found = attend(torch.empty(0, 4 * 64), torch.tensor([0, 0], dtype=torch.int32), (2, 1, 64))
    assert found.shape == (0, 128)


def test_both_forms_trace() -> None:
    heads = (4, 2, 64)
    qkv, cu_seqlens = pack(LENGTHS, heads, torch.float16)
    arguments = (qkv, cu_seqlens, 33, *heads, False, 0.125)
    torch.library.opcheck(ops.attention_varlen, arguments)
    torch.library.opcheck(ops.attention_varlen_out, (*arguments, torch.empty(56, 256, dtype=torch.float16)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(4, 100)}, r"qkv has shape \[4, 100\], wanted \[4, 256\]"),
        ({"qkv": torch.zeros(4, 256).double()}, "qkv has dtype float64"),
        ({"qkv": torch.zeros(256, 4).T}, "contiguous rows"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens has dtype int64, wanted int32"),
        ({"cu_seqlens": torch.tensor([[0, 4]]).int()}, r"cu_seqlens has shape \[1, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 5]).int()}, r"cu_seqlens is \[0, 5\], wanted an ascending list within 0..4"),
        ({"cu_seqlens": torch.tensor([0, 3, 2]).int()}, "ascending"),
        ({"max_seqlen": 3}, "a sequence has 4 rows, max_seqlen is 3"),
        ({"max_seqlen": -1}, "max_seqlen is -1"),
        ({"kv_heads": 0}, "found 2 query and 0 key heads"),
        ({"q_heads": 1, "kv_heads": 2}, "2 key heads do not divide 1 query heads"),
        ({"scale": 0.0}, "scale is 0.0, wanted a positive number"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"out": torch.zeros(4, 64)}, r"out has shape \[4, 64\], wanted \[4, 128\]"),
        ({"out": torch.zeros(4, 128).half()}, "out has dtype float16, wanted float32"),
        ({"out": torch.zeros(128, 4).T}, "out has strides"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "qkv": torch.zeros(4, 256), "cu_seqlens": torch.tensor([0, 4]).int(), "max_seqlen": 4, "q_heads": 2,
        "kv_heads": 1, "head_dim": 64, "causal": False, "scale": 0.125,
    }  # fmt: skip
    given |= change
    with pytest.raises(OpError, match=message):
        (ops.attention_varlen_out if "out" in given else ops.attention_varlen)(**given)
