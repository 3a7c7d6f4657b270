"""What is timed: each op with synthetic operands at one shape, its check against FP64, its work and its traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from omniw4 import int4, ops, repack
from omniw4.repack import mma_s8, wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear

TOLERANCE = 2.0  # times the error of plain torch in the same dtype against FP64 (docs/numerics.md)
CHECKED_ROWS = 32  # first and last rows compared with FP64; a row's bits never depend on the others
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # of the backbone: what qknorm_rope is timed on
EPS = 1e-6

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op at one shape, ready to be checked and timed.

    ``calls`` do the same work over distinct weights. ``check`` returns the relative error and its tolerance.
    """

    op: str
    m: int
    n: int
    k: int
    ops: int
    bytes: int
    calls: list[Call]
    check: Callable[[], tuple[float, float]]
    baseline: list[Call] | None = None
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share.

    Args:
        layout: ``"canonical"``, or the kernel family's.
        copies: distinct weights a case goes through.
    """

    device: torch.device
    dtype: torch.dtype
    spec: LinearSpec
    layout: str = ops.CANONICAL
    copies: int = 1


def linear_cases(setting: Setting, m: int, n: int, k: int) -> list[Case]:
    """``quantize_lora_down``, ``gemm_lora_up``, and both as one linear, at ``[m, k] x [n, k]ᵀ``."""
    generator = torch.Generator().manual_seed(0)
    canonical = [synthetic(n, k, setting.spec, setting.dtype, generator) for _ in range(setting.copies)]
    weights = [_prepare(linear, setting) for linear in canonical]
    x = torch.randn(m, k, generator=generator).to(setting.dtype).to(setting.device)
    dense = [torch.randn(n, k, generator=generator).to(x) for _ in range(setting.copies)]
    acts = _quantize(x, weights[0], setting)
    rank, item = setting.spec.rank, setting.dtype.itemsize
    act_bytes = {4: m * k // 2 + m * k // 32, 8: m * k + 2 * m, 16: m * k * item}[setting.spec.act_bits]
    if setting.layout in (mma_s8.LAYOUT, wgmma_s8.LAYOUT):  # a byte a code
        per_token = setting.spec.act_bits == 8 or setting.spec.scale_type == "integer"
        act_bytes = m * k + 4 * (m if per_token else m * k // 64)
    weight_bytes = n * k // 2 + n * k // 32 + n * rank * 2
    rows = _checked_rows(m)
    baseline: list[Call] = [lambda w=w: F.linear(x, w) for w in dense]  # type: ignore[misc]

    def check_gemm(y: torch.Tensor) -> tuple[float, float]:
        return _gemm_error(x[rows].cpu(), y[rows].cpu(), canonical[0], setting)

    def both(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return _gemm(_quantize(x, w, setting), w, m, n, setting)

    return [
        Case(
            "quantize_lora_down", m, n, k,
            ops=2 * m * k * rank,
            bytes=m * k * item + act_bytes + k * rank * 2 + m * rank * 4,
            calls=[lambda w=w: _quantize(x, w, setting) for w in weights],  # type: ignore[misc]
            check=lambda: _lora_error(x[rows].cpu(), _lora_act(acts[2], setting, m)[rows].cpu(), canonical[0]),
            note="ops are those of the FP16 low-rank product",
        ),
        Case(
            "gemm_lora_up", m, n, k,
            ops=2 * m * n * k,
            bytes=act_bytes + weight_bytes + m * rank * 4 + m * n * item,
            calls=[lambda w=w: _gemm(acts, w, m, n, setting) for w in weights],  # type: ignore[misc]
            check=lambda: check_gemm(_gemm(acts, weights[0], m, n, setting)),
            baseline=baseline,
        ),
        Case(
            "linear", m, n, k,
            ops=2 * m * n * k,
            bytes=m * k * item + weight_bytes + k * rank * 2 + m * n * item,
            calls=[lambda w=w: both(w) for w in weights],  # type: ignore[misc]
            check=lambda: check_gemm(both(weights[0])),
            baseline=baseline,
            note="quantize_lora_down and gemm_lora_up",
        ),
    ]  # fmt: skip


def rms_case(setting: Setting, m: int, k: int) -> Case:
    """``inv_rms`` over ``[m, k]``: memory alone."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(setting.dtype).to(setting.device)

    def check() -> tuple[float, float]:
        exact = (x.double().square().mean(-1) + EPS).rsqrt()
        return _error(ops.inv_rms(x, EPS), exact), 4 * torch.finfo(torch.float32).eps

    moved = m * k * setting.dtype.itemsize + 4 * m
    return Case("inv_rms", m, 1, k, 2 * m * k, moved, [lambda: ops.inv_rms(x, EPS)], check)


def rope_case(setting: Setting, m: int) -> Case:
    """``qknorm_rope`` over the backbone's heads, in place: memory alone."""
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = torch.randn(m, width, generator=torch.Generator().manual_seed(0)).to(setting.dtype).to(setting.device)
    weight = torch.ones(HEAD_DIM, dtype=setting.dtype, device=setting.device)
    cos, sin = (table.to(setting.device) for table in ops.rope_tables(m, HEAD_DIM, 1e6))
    positions = torch.arange(m, device=setting.device)

    def run(target: torch.Tensor) -> torch.Tensor:
        ops.qknorm_rope(target, weight, weight, cos, sin, positions, HEADS, KV_HEADS, HEAD_DIM, EPS)
        return target

    def check() -> tuple[float, float]:
        exact, plain = (_rope(qkv, cos, sin, dtype) for dtype in (torch.float64, setting.dtype))
        return _error(run(qkv.clone()), exact), _tolerance(plain, exact)

    turned = m * (HEADS + KV_HEADS) * HEAD_DIM
    moved = 2 * turned * setting.dtype.itemsize
    return Case("qknorm_rope", m, width, HEAD_DIM, 9 * turned, moved, [lambda: run(qkv)], check)


def synthetic(n: int, k: int, spec: LinearSpec, dtype: torch.dtype, generator: torch.Generator) -> QuantizedLinear:
    """A quantized linear of random codes, with scales and a low-rank branch of a trained layer's size."""
    half = torch.float16 if dtype == torch.float32 else dtype
    scales = (torch.rand(n, k // int4.GROUP_SIZE, generator=generator) + 0.5) * 0.01
    rank, rows = spec.rank, None
    if spec.scale_type == "integer":
        rows = scales.amax(1) / int4.INTEGER_SCALE_MAX
        scales = (scales / rows[:, None]).round()

    def branch(rows: int) -> torch.Tensor | None:
        return (torch.randn(rows, rank, generator=generator) * 0.05).to(half) if rank else None

    return QuantizedLinear(
        replace(spec, smooth=False),
        torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        scales.to(torch.float16 if rows is None else torch.uint8),
        branch(k),
        branch(n),
        row_scales=rows,
    )


def _prepare(linear: QuantizedLinear, setting: Setting) -> dict[str, torch.Tensor]:
    """The weight tensors as the ops of this layout read them, on the device."""
    canonical = setting.layout == ops.CANONICAL
    tensors = linear.tensors() if canonical else repack.get(setting.layout).pack(linear)
    return {name: t.to(setting.device) for name, t in tensors.items()}


def _quantize(x: torch.Tensor, w: dict[str, torch.Tensor], setting: Setting) -> Any:
    spec = setting.spec
    return ops.quantize_lora_down(
        x, w.get("proj_down"), None, None, None, spec.rotation, spec.act_bits, spec.act_clip, setting.layout,
        spec.scale_type,
    )  # fmt: skip


def _gemm(acts: Any, w: dict[str, torch.Tensor], m: int, n: int, setting: Setting) -> torch.Tensor:
    qact, a_scales, lora_act, token_scales = acts
    up = w.get("proj_up")
    y: torch.Tensor = ops.gemm_lora_up(
        qact, a_scales, w["qweight"], w["w_scales"], None if up is None else lora_act, up, None, None, m, n,
        setting.spec.act_bits, "plain", setting.dtype, setting.layout, w.get("row_scales"), token_scales,
    )  # fmt: skip
    return y


def _lora_act(lora_act: torch.Tensor, setting: Setting, m: int) -> torch.Tensor:
    """``[M, R]`` whatever the layout."""
    if setting.layout == wgmma_s8.LAYOUT:
        return wgmma_s8.unpack_lora_act(lora_act, m, setting.spec.rank)
    return lora_act


def _checked_rows(m: int) -> torch.Tensor:
    half = CHECKED_ROWS // 2
    return torch.arange(m) if m <= CHECKED_ROWS else torch.cat([torch.arange(half), torch.arange(m - half, m)])


def _gemm_error(x: torch.Tensor, y: torch.Tensor, linear: QuantizedLinear, setting: Setting) -> tuple[float, float]:
    """Error of ``y [T, N]`` and what is allowed, against the reference in FP64 over the same codes."""
    spec = setting.spec
    acts = ops.quantize_lora_down_ref(
        x, linear.proj_down, None, None, None, spec.rotation, spec.act_bits, spec.act_clip, spec.scale_type
    )

    def reference(dtype: torch.dtype, compute: torch.dtype) -> torch.Tensor:
        lora = None if linear.proj_up is None else acts[2]
        return ops.gemm_lora_up_ref(
            acts[0], acts[1], linear.qweight, linear.w_scales, lora, linear.proj_up, None, None, x.shape[0],
            linear.out_features, spec.act_bits, "plain", dtype, linear.row_scales, acts[3], compute,
        )  # fmt: skip

    exact = reference(torch.float32, torch.float64)
    return _error(y, exact), _tolerance(reference(setting.dtype, setting.dtype), exact)


def _lora_error(x: torch.Tensor, lora_act: torch.Tensor, linear: QuantizedLinear) -> tuple[float, float]:
    """Error of ``lora_act [T, R]`` against ``x'·proj_down`` in FP64; 0 for rank 0."""
    if linear.proj_down is None:
        return 0.0, 0.0
    rotated = ops.transform(x, None, None, None, linear.spec.rotation)
    exact = rotated.double() @ linear.proj_down.double()
    plain = rotated.to(x.dtype) @ linear.proj_down.to(x.dtype)
    return _error(lora_act, exact), _tolerance(plain, exact)


def _rope(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Per-head RMSNorm of weight 1 and rotary embedding in plain torch, ``[M, (Hq + 2·Hkv)·D]``."""
    heads = qkv.to(dtype).reshape(qkv.shape[0], -1, HEAD_DIM)
    turned = F.rms_norm(heads[:, : HEADS + KV_HEADS], (HEAD_DIM,), eps=EPS)
    low, high = turned.chunk(2, dim=-1)
    c, s = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    turned = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
    return torch.cat((turned, heads[:, HEADS + KV_HEADS :]), dim=1).flatten(1)


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double()
    return float((y.double() - exact).norm() / exact.norm())


def _tolerance(plain: torch.Tensor, exact: torch.Tensor) -> float:
    return max(TOLERANCE * _error(plain, exact), torch.finfo(plain.dtype).eps / 2)
