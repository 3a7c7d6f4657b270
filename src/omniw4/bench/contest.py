"""Whole linears against what torch offers for the same product: FP16, FP8 and INT8 of cuBLAS, in one run.

Every contestant goes through the same number of distinct weights in one CUDA graph, so that they come from memory as in
a forward. Ours are timed whole, activation quantization and low-rank branch included, and in parts; theirs as a product
alone and, where activations must be quantized first, with that. Linears that share an input are stacked, as an engine
stacks them: q, k, v, and gate, up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from omniw4 import int4, ops
from omniw4.bench.linear_rows import Contest, QuantizerRow
from omniw4.bench.result import Ceiling, OnProgress, Progress
from omniw4.bench.timing import Timing, measure
from omniw4.errors import UsageError
from omniw4.ops import gemm_wgmma_s8
from omniw4.repack import wgmma_s8
from omniw4.tensors import LinearSpec, QuantizedLinear

TOKENS = (1, 16, 64, 128, 256, 512, 704, 1024, 2048, 4096)
COPIES = 28  # distinct weights: the layers of the backbone
RANK = 16
CHECKED_ROWS = 32
TOLERANCE = 2.0  # times the error of plain torch in the same dtype against FP64 (docs/numerics.md)
QUANTIZER = ((704, 1024), (8192, 1024))  # M, K at which the quantizer is held against a copy of as many bytes


@dataclass(frozen=True)
class Weight:
    """A linear of a model, or several that share an input: their output features, in ``parts``."""

    name: str
    parts: tuple[int, ...]
    k: int

    @property
    def n(self) -> int:
        return sum(self.parts)


WEIGHTS = (
    Weight("qkv", (2048, 1024, 1024), 1024),
    Weight("o", (1024,), 2048),
    Weight("gate_up", (3072, 3072), 1024),
    Weight("down", (1024,), 3072),
    Weight("4096→12288", (12288,), 4096),
    Weight("12288→4096", (4096,), 12288),
    Weight("4096→4096", (4096,), 4096),
)


def contest(
    device: torch.device,
    *,
    weights: Sequence[Weight] = WEIGHTS,
    tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.float16,
    ceiling: Ceiling | None = None,
    warmup: int = 2,
    repetitions: int = 10,
    on_progress: OnProgress | None = None,
) -> list[Contest]:
    """Check and time everything.

    Raises:
        UsageError: no GPU of compute capability 9.0, or no kernels compiled for it.
    """
    if device.type != "cuda" or not gemm_wgmma_s8.runs(device, 4):
        raise UsageError(
            "comparing linears needs a GPU of compute capability 9.0 and kernels compiled for 90a",
            hint="`--what ops` times the ops anywhere; `omniw4 roofline` predicts linears without a GPU",
        )
    rows = []
    for done, weight in enumerate(weights):
        field = _Field(weight, device, dtype)
        for step, m in enumerate(tokens):
            rows.append(field.run(m, warmup, repetitions))
            rows[-1].ceiling = ceiling
            if on_progress is not None:
                progress = done * len(tokens) + step + 1
                on_progress(Progress("linear", progress, len(weights) * len(tokens), f"{weight.name}, M {m}"))
        del field
        torch.cuda.empty_cache()
    return rows


def quantizer_rows(device: torch.device, warmup: int, repetitions: int) -> list[QuantizerRow]:
    return [_quantizer_row(m, k, device, warmup, repetitions) for m, k in QUANTIZER]


def _quantizer_row(m: int, k: int, device: torch.device, warmup: int, repetitions: int) -> QuantizerRow:
    copies = 8 if m > 1024 else COPIES
    x = [torch.randn(m, k, device=device).half() for _ in range(copies)]
    downs = [wgmma_s8.pack_proj_down(torch.randn(k, RANK, device=device).half()) for _ in range(copies)]
    norm = torch.rand(k, device=device).half()
    target = torch.empty(m * k * 3 // 2, dtype=torch.uint8, device=device)  # 3 bytes an element, read or written
    source = [torch.empty_like(target) for _ in range(copies)]

    def quantize(i: int, weight: torch.Tensor | None) -> Any:
        return ops.quantize_lora_down(
            x[i], downs[i], None, None, weight, "hadamard64", 4, 0.95, wgmma_s8.LAYOUT, "integer", 1e-6, True
        )

    def time(call: Callable[[int], Any]) -> Timing:
        return measure([partial(call, i) for i in range(copies)], device, warmup=warmup, repetitions=repetitions)

    return QuantizerRow(
        m,
        k,
        time(lambda i: quantize(i, None)),
        time(lambda i: quantize(i, norm)),
        time(lambda i: target.copy_(source[i])),
    )


class _Field:
    """The contestants of one weight: COPIES distinct ones of each kind."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        self.weight, self.device, self.dtype, self.m = weight, device, dtype, 0
        g = torch.Generator(device).manual_seed(weight.n + weight.k)
        self.linears = {kind: _synthetic(weight, kind, dtype, g) for kind in ("integer", "float16")}
        self.packed = {kind: [_pack(linear, weight, i) for i in range(COPIES)] for kind, linear in self.linears.items()}
        n, k = weight.n, weight.k
        self.dense = [torch.randn(n, k, generator=g, device=device).mul_(k**-0.5).to(dtype) for _ in range(COPIES)]
        self.fp8 = [w.to(torch.float8_e4m3fn).t() for w in self.dense]
        self.fp8_scale = torch.rand(1, n, generator=g, device=device) + 0.5
        self.int8 = [torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device).t() for _ in range(COPIES)]

    def quantize(self, x: torch.Tensor, kind: str, bits: int, low_rank: bool, copy: int) -> Any:
        down = self.packed[kind][copy]["proj_down"] if low_rank else None
        return ops.quantize_lora_down(
            x, down, None, None, None, "hadamard64", bits, 0.95, wgmma_s8.LAYOUT, kind, 0.0, True
        )  # fmt: skip

    def product(self, acts: Any, kind: str, bits: int, low_rank: bool, copy: int) -> torch.Tensor:
        w = self.packed[kind][copy]
        y: torch.Tensor = ops.gemm_lora_up(
            acts[0], acts[1], w["qweight"], w["w_scales"], acts[2] if low_rank else None,
            w["proj_up"] if low_rank else None, None, None, self.m,
            self.weight.n, bits, "plain", self.dtype, wgmma_s8.LAYOUT, w.get("row_scales"), None,
            _ends(self.weight) if kind == "integer" and low_rank else None, True,
        )  # fmt: skip
        return y

    def whole(self, x: torch.Tensor, kind: str, bits: int, low_rank: bool, copy: int) -> torch.Tensor:
        return self.product(self.quantize(x, kind, bits, low_rank, copy), kind, bits, low_rank, copy)

    def run(self, m: int, warmup: int, repetitions: int) -> Contest:
        self.m = m
        weight, row = self.weight, Contest(self.weight.name, m, self.weight.n, self.weight.k)
        g = torch.Generator(self.device).manual_seed(m)
        x = torch.randn(m, weight.k, generator=g, device=self.device).to(self.dtype)
        calls: dict[str, Callable[[int], Any]] = {"fp16": lambda i: F.linear(x, self.dense[i])}
        for bits, kind in ((4, "integer"), (8, "integer"), (4, "float16"), (8, "float16")):
            name = f"w4a{bits}" + (" fp16 scales" if kind == "float16" else "")
            self._check(row, name, x, kind, bits)
            acts = self.quantize(x, kind, bits, True, 0)

            calls[name] = partial(self.whole, x, kind, bits, True)
            calls[f"{name} product"] = partial(self.product, acts, kind, bits, True)
            if (bits, kind) == (4, "integer"):
                calls[f"{name} rank 0"] = partial(self.whole, x, kind, bits, False)
                calls["quantize"] = partial(self.quantize, x, kind, bits, True)
        codes, scales = ops.quantize_fp8(x)

        def fp8(i: int, a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(a, self.fp8[i], scale_a=scale, scale_b=self.fp8_scale, out_dtype=torch.bfloat16)

        calls["fp8"] = lambda i: fp8(i, codes, scales)
        calls["fp8 quantized"] = lambda i: fp8(i, *ops.quantize_fp8(x))
        wide = torch.randint(-128, 128, (max(m, 32), weight.k), dtype=torch.int8, device=self.device)
        if m < 17:
            row.notes.append(f"int8: torch._int_mm needs more than 16 rows, timed with {len(wide)}")
        calls["int8"] = lambda i: torch._int_mm(wide, self.int8[i])
        if not row.checked:
            return row
        for name, call in calls.items():
            each = [partial(call, i) for i in range(COPIES)]
            row.times[name] = measure(each, self.device, warmup=warmup, repetitions=repetitions)
        return row

    def _check(self, row: Contest, name: str, x: torch.Tensor, kind: str, bits: int) -> None:
        """First and last rows of the output against FP64 over the same codes, as the reference quantizes them."""
        linear, half = self.linears[kind], CHECKED_ROWS // 2
        y = self.whole(x, kind, bits, True, 0)
        keep = (
            torch.arange(len(x)) if len(x) <= CHECKED_ROWS else torch.cat((torch.arange(half), torch.arange(-half, 0)))
        )
        some, y = x[keep], y[keep]
        codes, scales, _, outer = ops.quantize_lora_down_ref(
            some, None, None, None, None, "hadamard64", bits, 0.95, kind
        )
        if bits == 4:
            codes = int4.unpack_nibbles(codes)
            if kind == "integer":
                codes, scales = int4.widen(codes, scales), outer[:, None]
        acts = codes * scales.double().repeat_interleave(codes.shape[1] // scales.shape[1], 1)
        rotated = ops.transform(some, None, None, None, "hadamard64")
        exact, plain = (self._in(dtype, acts, rotated, linear) for dtype in (torch.float64, self.dtype))
        error, allowed = _error(y, exact), max(TOLERANCE * _error(plain, exact), torch.finfo(self.dtype).eps / 2)
        row.errors[name] = (error, allowed)
        if error > allowed:
            row.checked = False
            row.notes.append(f"{name}: error {error:.2e} against FP64 is above {allowed:.2e}")

    def _in(
        self, dtype: torch.dtype, acts: torch.Tensor, rotated: torch.Tensor, linear: QuantizedLinear
    ) -> torch.Tensor:
        assert linear.proj_down is not None
        assert linear.proj_up is not None
        y = acts.to(dtype) @ linear.dequantize_codes(torch.float64).to(dtype).T
        low = (rotated.to(dtype) @ linear.proj_down.to(dtype)).split(linear.proj_up.shape[1], dim=1)
        parts = linear.proj_up.to(dtype).split(self.weight.parts if len(low) > 1 else self.weight.n)
        return y + torch.cat([a @ up.T for a, up in zip(low, parts, strict=True)], dim=1)


def _ends(weight: Weight) -> list[int] | None:
    """Where the second part and those after it begin."""
    ends = torch.tensor(weight.parts).cumsum(0)[:-1].tolist()
    return ends or None


def _synthetic(weight: Weight, kind: str, dtype: torch.dtype, g: torch.Generator) -> QuantizedLinear:
    """Random codes, scales and low-rank branch of a trained layer's size. With integer scales every part has RANK
    columns of its own; kernels for FP16 scales know no parts, so there one branch serves them all."""
    n, k, device = weight.n, weight.k, g.device
    scales = (torch.rand(n, k // 64, generator=g, device=device) + 0.5) * 0.01
    rows, columns = None, RANK
    if kind == "integer":
        rows = scales.amax(1) / int4.INTEGER_SCALE_MAX
        scales, columns = (scales / rows[:, None]).round(), RANK * len(weight.parts)
    return QuantizedLinear(
        LinearSpec(rank=RANK, scale_type=kind),  # type: ignore[arg-type]
        torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8, device=device),
        scales.to(torch.float16 if rows is None else torch.uint8),
        (torch.randn(k, columns, generator=g, device=device) * 0.05).to(dtype),
        (torch.randn(n, RANK, generator=g, device=device) * 0.05).to(dtype),
        row_scales=rows,
    )


def _pack(linear: QuantizedLinear, weight: Weight, copy: int) -> dict[str, torch.Tensor]:
    """In fragment order; copies after the first hold the same blocks in another order, in memory of their own."""
    assert linear.proj_down is not None
    packed = wgmma_s8.pack(replace(linear, proj_down=linear.proj_down[:, :RANK]))
    packed["proj_down"] = wgmma_s8.pack_proj_down(linear.proj_down)
    return {name: t.roll(copy, 0) if name == "qweight" else t.clone() for name, t in packed.items()}


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact.double()).norm() / exact.double().norm())
