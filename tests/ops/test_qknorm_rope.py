"""qknorm_rope against transformers' own Qwen3 code in FP64, and its promises about rows."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.errors import OpError
from problems import assert_same, relative_error

HEADS = [(16, 8, 128), (9, 3, 64), (4, 4, 64), (4, 1, 32), (2, 2, 2)]


def qwen3(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    heads: tuple[int, int, int],
    eps: float,
    theta: float,
) -> torch.Tensor:
    """q_norm, k_norm and rotary embedding as transformers does them, in the dtype of qkv."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    num_heads, num_kv_heads, dim = heads
    q, k, v = qkv.split((num_heads * dim, num_kv_heads * dim, num_kv_heads * dim), dim=-1)
    q, k = q.reshape(1, -1, num_heads, dim), k.reshape(1, -1, num_kv_heads, dim)
    if weights is not None:
        normed = []
        for h, weight in zip((q, k), weights, strict=True):
            if qkv.dtype == torch.float64:  # Qwen3RMSNorm would go down to FP32
                normed.append(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.double())
                continue
            norm = Qwen3RMSNorm(dim, eps)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            normed.append(norm(h))
        q, k = normed
    angles = positions.double()[:, None] * theta ** -(torch.arange(0, dim, 2).double() / dim)
    angles = torch.cat((angles, angles), -1)[None]
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    tokens = qkv.shape[0]
    return torch.cat((q.transpose(1, 2).reshape(tokens, -1), k.transpose(1, 2).reshape(tokens, -1), v), -1)


def problem(m: int, heads: tuple[int, int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    num_heads, num_kv_heads, dim = heads
    cos, sin = ops.rope_tables(512, dim, 1e6)
    return {
        "qkv": torch.randn(m, (num_heads + 2 * num_kv_heads) * dim).to(dtype),
        "q_weight": (torch.rand(dim) + 0.5).to(dtype),
        "k_weight": (torch.rand(dim) + 0.5).to(dtype),
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 512, (m,)),
    }


def run(given: dict[str, torch.Tensor], heads: tuple[int, int, int], eps: float = 1e-6) -> torch.Tensor:
    names = ("q_weight", "k_weight", "cos", "sin", "positions")
    qkv = given["qkv"].clone()
    ops.qknorm_rope(qkv, *(given.get(name) for name in names), *heads, eps)
    return qkv


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_at_most_twice_the_error_of_transformers(heads: tuple[int, int, int], norm: bool, dtype: torch.dtype) -> None:
    given = problem(37, heads, dtype)
    weights = (given["q_weight"], given["k_weight"]) if norm else None
    if not norm:
        given = {k: v for k, v in given.items() if k not in ("q_weight", "k_weight")}
    out = run(given, heads, 1e-5)
    truth = qwen3(given["qkv"].double(), weights, given["positions"], heads, 1e-5, 1e6)
    plain = qwen3(given["qkv"], weights, given["positions"], heads, 1e-5, 1e6)
    assert relative_error(out, truth) <= 2 * relative_error(plain, truth)
    values = heads[1] * heads[2]
    assert_same(out[:, -values:], given["qkv"][:, -values:], "values")


def test_a_row_is_the_same_alone() -> None:
    heads = (16, 8, 128)
    given = problem(67, heads, torch.bfloat16)
    batched = run(given, heads)
    for m in (0, 33, 66):
        one = given | {"qkv": given["qkv"][m : m + 1], "positions": given["positions"][m : m + 1]}
        assert_same(run(one, heads)[0], batched[m], f"row {m}")


def test_positions_outside_the_table_give_nan_in_their_row() -> None:
    heads = (4, 2, 64)
    given = problem(5, heads, torch.float16)
    clean = run(given, heads)
    given["positions"] = given["positions"].clone()
    given["positions"][1], given["positions"][3] = 512, -1
    out = run(given, heads)
    assert out[[1, 3], : 6 * 64].isnan().all()
    assert_same(out[:, 6 * 64 :], given["qkv"][:, 6 * 64 :], "values")
    assert_same(out[[0, 2, 4]], clean[[0, 2, 4]], "other rows")


def test_works_on_a_slice_in_place_and_on_no_rows() -> None:
    heads = (4, 2, 64)
    given = problem(6, heads, torch.float32)
    wide = torch.randn(6, 1000)
    wide[:, :512] = given["qkv"]
    rest = wide[:, 512:].clone()
    names = ("q_weight", "k_weight", "cos", "sin", "positions")
    ops.qknorm_rope(wide[:, :512], *(given[name] for name in names), *heads, 1e-6)
    assert_same(wide[:, :512], run(given, heads), "slice")
    assert_same(wide[:, 512:], rest, "beside it")
    empty = given | {"qkv": given["qkv"][:0], "positions": given["positions"][:0]}
    assert run(empty, heads).shape == (0, 512)


@pytest.mark.parametrize(
    ("change", "heads", "message"),
    [
        ({"qkv": torch.zeros(6, 500)}, (4, 2, 64), r"qkv has shape \[6, 500\], wanted \[6, 512\]"),
        ({"qkv": torch.zeros(512, 6).T}, (4, 2, 64), "wanted contiguous rows"),
        ({"positions": torch.zeros(6, dtype=torch.int32)}, (4, 2, 64), "positions has dtype int32"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, (4, 2, 64), r"positions has shape \[5\]"),
        ({"cos": torch.zeros(512, 32).half()}, (4, 2, 64), "cos has dtype float16"),
        ({"sin": torch.zeros(511, 32)}, (4, 2, 64), r"sin has shape \[511, 32\], wanted \[512, 32\]"),
        ({"k_weight": torch.zeros(32)}, (4, 2, 64), r"k_weight has shape \[32\]"),
        ({"q_weight": torch.zeros(64).half()}, (4, 2, 64), "q_weight has dtype float16"),
        ({}, (5, 2, 64), "do not divide"),
        ({}, (4, 2, 63), "head_dim is 63"),
    ],
)
def test_refused_by_name(change: dict[str, torch.Tensor], heads: tuple[int, int, int], message: str) -> None:
    given = problem(6, (4, 2, 64), torch.float32) | change
    names = ("qkv", "q_weight", "k_weight", "cos", "sin", "positions")
    with pytest.raises(OpError, match=f"qknorm_rope: .*{message}"):
        ops.qknorm_rope(*(given[name] for name in names), *heads, 1e-6)


def test_registration() -> None:
    given = problem(3, (4, 2, 64), torch.float32)
    names = ("qkv", "q_weight", "k_weight", "cos", "sin", "positions")
    torch.library.opcheck(ops.qknorm_rope, (*(given[name] for name in names), 4, 2, 64, 1e-6))
