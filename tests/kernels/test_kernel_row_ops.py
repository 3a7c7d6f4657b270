"""inv_rms, pack_lora_act and qknorm_rope on a GPU, and the last one fused into the GEMM."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, LAYOUT, gemm, input_on_gpu, linear_on_gpu, quantize

from omniw4 import ops, repack
from problems import assert_same, relative_error

pytestmark = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16)
HEADS = [(16, 8, 128), (9, 3, 64), (4, 4, 64), (2, 1, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 8, 100, 576, 1021, 1024, 3072, 14336])
def test_inv_rms(width: int, dtype: torch.dtype) -> None:
    for m in (1, 5, 257):
        x = input_on_gpu(m, width + 5, dtype)[:, :width]
        found, exact = ops.inv_rms(x, 1e-6), (x.double().square().mean(-1) + 1e-6).rsqrt()
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=0)
        assert_same(found, ops.inv_rms(x.contiguous(), 1e-6), "rows apart and rows together")
        assert_same(found[m // 2 : m // 2 + 1], ops.inv_rms(x[m // 2 : m // 2 + 1], 1e-6), "a row alone")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 15, 16, 17, 96, 256])
def test_pack_lora_act(rank: int, dtype: torch.dtype) -> None:
    for m in (1, 16, 33, 1021):
        lora_act = torch.randn(m, rank, generator=torch.Generator(DEVICE).manual_seed(m), device=DEVICE) * 100
        lora_act[0, 0] = 1e6
        assert_same(ops.pack_lora_act(lora_act, dtype), ops.pack_lora_act_ref(lora_act, dtype), f"m {m}")


def rotary(m: int, head_dim: int, dtype: torch.dtype, norm: bool = True) -> tuple[torch.Tensor | None, ...]:
    g = torch.Generator(DEVICE).manual_seed(m)
    cos, sin = (table.to(DEVICE) for table in ops.rope_tables(4096, head_dim, 1e6))
    positions = torch.randint(0, 4096, (m,), generator=g, device=DEVICE)
    weights = [(torch.rand(head_dim, generator=g, device=DEVICE) + 0.5).to(dtype) if norm else None for _ in range(2)]
    return (*weights, cos, sin, positions)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_qknorm_rope(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    for m in (1, 7, 353):
        qkv = input_on_gpu(m, (heads + 2 * kv_heads) * head_dim, dtype)
        tables = rotary(m, head_dim, dtype, norm)
        found, plain = qkv.clone(), qkv.clone()
        ops.qknorm_rope(found, *tables, heads, kv_heads, head_dim, 1e-6)  # type: ignore[arg-type]
        ops.qknorm_rope_ref(plain, *tables, heads, kv_heads, head_dim, 1e-6)  # type: ignore[arg-type]
        values = (heads + kv_heads) * head_dim
        assert_same(found[:, values:], qkv[:, values:], "values")
        # one unit in the last place of the dtype where the order of a sum or a fused multiply-add decides a rounding
        assert relative_error(found, plain) < (1e-3 if dtype == torch.bfloat16 else 2e-4)
        wide = torch.zeros(m, qkv.shape[1] + 24, dtype=dtype, device=DEVICE)
        wide[:, 8:-16] = qkv
        ops.qknorm_rope(wide[:, 8:-16], *tables, heads, kv_heads, head_dim, 1e-6)  # type: ignore[arg-type]
        assert_same(wide[:, 8:-16], found, "rows apart")
        assert not wide[:, :8].any()
        assert not wide[:, -16:].any()


def test_a_position_outside_the_table_gives_nan() -> None:
    qkv = input_on_gpu(3, 4 * 64, torch.float16)
    q, k, cos, sin, positions = rotary(3, 64, torch.float16)
    positions[1] = 4096  # type: ignore[index]
    ops.qknorm_rope(qkv, q, k, cos, sin, positions, 2, 1, 64, 1e-6)  # type: ignore[arg-type]
    assert qkv[1, : 3 * 64].isnan().all()
    assert qkv[1, 3 * 64 :].isfinite().all()
    assert qkv[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_fused_with_the_gemm_gives_the_same_bits(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    n = (heads + 2 * kv_heads) * head_dim
    linear = linear_on_gpu(n, 512, 16, dtype)
    packed = repack.get(LAYOUT).pack(linear)
    for m in (1, 19, 700):
        acts = quantize(input_on_gpu(m, 512, dtype), linear)
        wanted = gemm(acts, linear, dtype, tokens=m, packed=packed)
        tables = rotary(m, head_dim, dtype)
        ops.qknorm_rope(wanted, *tables, heads, kv_heads, head_dim, 1e-6)  # type: ignore[arg-type]
        found = ops.gemm_qknorm_rope(
            acts[0], acts[1], packed["qweight"], packed["w_scales"], acts[2], packed["proj_up"], linear.bias, *tables,
            heads, kv_heads, head_dim, 1e-6, m, 4, dtype, LAYOUT,
        )  # fmt: skip
        assert_same(found, wanted, f"m {m}")
