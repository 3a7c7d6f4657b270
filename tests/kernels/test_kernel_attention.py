"""attention_varlen on a GPU: its error, its rows, graphs whose boundaries change, nothing touched but its own."""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE

from omniw4 import ops
from omniw4.ops import extension
from problems import assert_same, relative_error

pytestmark = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16)
HEADS = [(16, 8, 128), (4, 4, 64), (6, 2, 128), (5, 1, 64)]
# a tile and its neighbours, empty sequences, more work than multiprocessors, more sequences than lanes
LENGTHS = [(352, 352), (1,), (63, 0, 64, 65, 1, 129), (700, 5), (1024, 1024, 384), (9, 70) * 20]
Heads = tuple[int, int, int]


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if not ops.attention_kernel_runs(DEVICE, 128):
        pytest.skip(f"the kernel is for sm_90a; compiled: {' '.join(extension.compiled_archs())}")


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def random_qkv(rows: int, heads: Heads, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
    """Rows that lie further apart than they are wide."""
    width = (heads[0] + 2 * heads[1]) * heads[2]
    qkv = torch.randn(rows, width + 16, generator=torch.Generator(DEVICE).manual_seed(rows), device=DEVICE) * std
    return qkv.to(dtype)[:, 8:-8]


def attend(qkv: torch.Tensor, cu_seqlens: torch.Tensor, heads: Heads, causal: bool = False) -> torch.Tensor:
    """Into an output that is NaN before."""
    out = torch.full((qkv.shape[0], heads[0] * heads[2]), float("nan"), dtype=qkv.dtype, device=DEVICE)
    ops.attention_varlen_out(qkv, cu_seqlens, qkv.shape[0], *heads, causal, heads[2] ** -0.5, out)
    return out


def plain(qkv: torch.Tensor, lengths: tuple[int, ...], heads: Heads, causal: bool) -> torch.Tensor:
    """torch's own attention over each sequence alone, in the dtype of qkv."""
    q_heads, kv_heads, head_dim = heads
    out = []
    for rows in qkv[: sum(lengths)].split(lengths):
        q, k, v = rows.unflatten(1, (-1, head_dim)).transpose(0, 1).split((q_heads, kv_heads, kv_heads))
        k, v = (t.repeat_interleave(q_heads // kv_heads, 0) for t in (k, v))
        found = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]
        out.append(found.transpose(0, 1).flatten(1))
    return torch.cat(out)


def exact(qkv: torch.Tensor, cu_seqlens: torch.Tensor, heads: Heads, causal: bool) -> torch.Tensor:
    """The contract in FP64, rounded to FP32."""
    values = qkv.nan_to_num().float()
    scale, longest = heads[2] ** -0.5, qkv.shape[0]
    out = torch.zeros(longest, heads[0] * heads[2], device=DEVICE)
    arguments = (values, cu_seqlens, longest, *heads, causal, scale)
    with pytest.MonkeyPatch.context() as patch:  # on a GPU the op takes 16-bit floats alone; its reference takes more
        patch.setattr(sys.modules[ops.attention_varlen_ref.__module__], "require_activations", lambda *_: None)
        return ops.attention_varlen_ref(*arguments, out, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_at_most_twice_the_error_of_torch(heads: Heads, causal: bool, dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        rows = sum(lengths)
        qkv, cu_seqlens = random_qkv(rows + 37, heads, dtype), boundaries(lengths)
        qkv[rows:] = float("nan")
        found, truth = attend(qkv, cu_seqlens, heads, causal), exact(qkv, cu_seqlens, heads, causal)
        allowed = 2 * relative_error(plain(qkv, lengths, heads, causal), truth[:rows])
        assert relative_error(found[:rows], truth[:rows]) <= max(allowed, torch.finfo(dtype).eps / 2), lengths
        assert not found[rows:].any(), f"{lengths}: rows of no sequence"


@pytest.mark.parametrize("std", [0.0, 5.0])
def test_flat_and_sharp_scores(std: float) -> None:
    """All scores alike, and rows in which one key takes nearly all: the largest score grows from tile to tile."""
    heads, lengths = (4, 2, 128), (700, 300)
    qkv = random_qkv(1000, heads, torch.float16)
    qkv[:, : 6 * 128] *= std
    qkv[:, 4 * 128 : 6 * 128] *= torch.linspace(0.1, 1, 1000, device=DEVICE)[:, None]
    truth = exact(qkv, boundaries(lengths), heads, False)
    allowed = 2 * relative_error(plain(qkv, lengths, heads, False), truth)
    assert relative_error(attend(qkv, boundaries(lengths), heads), truth) <= max(allowed, 2.0**-11)


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence(causal: bool) -> None:
    heads, lengths = (2, 1, 128), (9001,)
    qkv, cu_seqlens = random_qkv(9001, heads, torch.bfloat16), boundaries(lengths)
    truth = exact(qkv, cu_seqlens, heads, causal)
    allowed = 2 * relative_error(plain(qkv, lengths, heads, causal), truth)
    assert relative_error(attend(qkv, cu_seqlens, heads, causal), truth) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_a_sequence_is_the_same_alone_and_among_others(heads: Heads, causal: bool, dtype: torch.dtype) -> None:
    lengths = (130, 1, 0, 352, 47, 300, 64, 15)
    qkv, cu_seqlens = random_qkv(sum(lengths), heads, dtype), boundaries(lengths)
    together = attend(qkv, cu_seqlens, heads, causal)
    for number, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        if first == last:
            continue
        alone = attend(qkv[first:last].clone(), boundaries((last - first,)), heads, causal)
        assert_same(together[first:last], alone, f"sequence {number} alone")
        spoilt = torch.full_like(qkv, float("nan"))
        spoilt[first:last] = qkv[first:last]
        found = attend(spoilt, cu_seqlens, heads, causal)
        assert_same(found[first:last], alone, f"sequence {number} among NaN")


def test_equal_bits_over_a_hundred_runs() -> None:
    qkv, cu_seqlens = random_qkv(1100, (16, 8, 128), torch.float16), boundaries((352, 341, 400))
    first = attend(qkv, cu_seqlens, (16, 8, 128))
    for run in range(100):
        assert_same(attend(qkv, cu_seqlens, (16, 8, 128)), first, f"run {run}")


@pytest.mark.parametrize("ready", [False, True])
def test_a_replayed_graph_follows_its_boundaries(ready: bool) -> None:
    """A chain, each call's output being the next one's queries, so that kernels start while what they read is written;
    in a graph and outside the same bits, and those of calls that wait for one another."""
    heads, rows, sequences, width = (16, 8, 128), 768, 6, 16 * 128
    cu_seqlens = boundaries((128,) * sequences)
    stages = [random_qkv(rows, heads, torch.float16).clone() for _ in range(5)]

    def chain(wait: bool = False) -> list[torch.Tensor]:
        for source, target in pairwise(stages):
            out = target[:, :width]
            ops.attention_varlen_out(source, cu_seqlens, rows, *heads, False, 128**-0.5, out, ready)
            if wait:
                torch.cuda.synchronize()
        return [stage[:, :width].clone() for stage in stages[1:]]

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    generator = torch.Generator().manual_seed(0)
    for replay in range(50):
        cuts = torch.randint(0, rows + 1, (sequences,), generator=generator).sort().values
        cu_seqlens.copy_(torch.cat((torch.zeros(1, dtype=torch.int64), cuts)))
        graph.replay()
        found = [out.clone() for out in replayed]
        for how, wanted in (("eager", chain()), ("one at a time", chain(wait=True))):
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                assert_same(one, other, f"replay {replay} against {how}, call {number}, boundaries {cuts.tolist()}")
                assert one.isfinite().all()


def test_boundaries_without_sense_touch_nothing_else() -> None:
    heads = (4, 2, 64)
    qkv = random_qkv(300, heads, torch.float16)
    wide = torch.full((400, 256 + 32), 7.0, dtype=torch.float16, device=DEVICE)
    out = wide[50:350, 16:-16]
    for bad in ([0, 500, 900], [-70, 100, 300], [0, 200, 100, 300], [2**31 - 1, -(2**31), 5]):
        cu_seqlens = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
        ops.attention_varlen_out(qkv, cu_seqlens, 300, *heads, False, 0.125, out)
        torch.cuda.synchronize()
        for margin in (wide[:50], wide[350:], wide[:, :16], wide[:, -16:]):
            assert (margin == 7).all(), bad


def test_the_result_does_not_depend_on_the_longest_sequence_promised() -> None:
    heads = (16, 8, 128)
    qkv, cu_seqlens = random_qkv(2000, heads, torch.float16), boundaries((1500, 500))
    for promised in (0, 1, 1500, 2000):
        found = ops.attention_varlen(qkv, cu_seqlens, promised, *heads, True, 128**-0.5)
        assert_same(found, attend(qkv, cu_seqlens, heads, causal=True), f"promised {promised}")


def test_rows_that_the_kernel_cannot_read_are_copied() -> None:
    heads = (4, 2, 64)
    wide = torch.randn(90, 600, device=DEVICE).half()
    view, target = wide[:, 3:515], torch.zeros(90, 301, dtype=torch.float16, device=DEVICE)
    ops.attention_varlen_out(view, boundaries((90,)), 90, *heads, False, 0.125, target[:, 5:261])
    assert_same(target[:, 5:261], attend(view.contiguous(), boundaries((90,)), heads), "views off 16 bytes")
    assert not target[:, :5].any()
    assert not target[:, 261:].any()
