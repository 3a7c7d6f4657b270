"""Time ``attention_varlen`` beside torch's attention at the backbone's heads. Needs a GPU of compute capability 9.0.

A case is so many sequences of one length. Every row is 28 calls replayed as one CUDA graph, microseconds a call, after
a check against FP64. torch's own are given what suits them, queries, keys and values already apart and contiguous (and,
for ``varlen_attn``, key heads already repeated); ``attention_varlen`` reads the fused rows. ``ready``: with the promise
that no kernel right before writes the boundaries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

Q_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
LAYERS = 28
CASES = "2x64,2x128,2x256,2x352,2x512,2x1024,8x352,1x8192"
CHECKED_ROWS = 512  # of the first sequence, against FP64


def parse_cases(text: str) -> list[tuple[int, int]]:
    cases = []
    for part in text.split(","):
        sequences, _, length = part.strip().partition("x")
        if not (sequences.isdigit() and length.isdigit() and int(sequences) and int(length)):
            raise SystemExit(
                f"error: --cases wants SEQUENCESxLENGTH, found {part.strip()!r}\n\nhint: such as 2x352,8x128"
            )
        cases.append((int(sequences), int(length)))
    return cases


def providers(sequences: int, length: int, dtype: Any, causal: bool) -> tuple[dict[str, Callable[[], Any]], Any]:
    """A call of each, by name, and qkv ``[sequences · length, (Hq + 2·Hkv)·D]``."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from omniw4 import ops

    tokens, device = sequences * length, torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    heads = Q_HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, heads * HEAD_DIM, generator=generator, device=device).to(dtype)
    cu_seqlens = torch.arange(sequences + 1, device=device, dtype=torch.int32) * length
    out = torch.empty(tokens, Q_HEADS * HEAD_DIM, dtype=dtype, device=device)
    scale = HEAD_DIM**-0.5

    def ours(ready: bool) -> Any:
        ops.attention_varlen_out(
            qkv, cu_seqlens, length, Q_HEADS, KV_HEADS, HEAD_DIM, causal, scale, out, ready
        )  # fmt: skip
        return out

    packed = [t.contiguous() for t in qkv.view(tokens, heads, HEAD_DIM).split((Q_HEADS, KV_HEADS, KV_HEADS), 1)]
    q, k, v = (t.view(sequences, length, -1, HEAD_DIM).transpose(1, 2).contiguous() for t in packed)

    def sdpa(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    calls: dict[str, Callable[[], Any]] = {
        "omniw4": lambda: ours(False),
        "ready": lambda: ours(True),
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if not causal:  # how to ask for a causal one has changed between versions of torch
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return calls, qkv
        repeated = [packed[0], *(t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in packed[1:])]
        calls["varlen_attn"] = lambda: varlen_attn(*repeated, cu_seqlens, cu_seqlens, length, length)
    return calls, qkv


def error(found: Any, qkv: Any, length: int, causal: bool) -> float:
    """Relative error of the first rows of the first sequence against FP64."""
    import torch

    q, k, v = qkv[:length].view(length, -1, HEAD_DIM).double().transpose(0, 1).split((Q_HEADS, KV_HEADS, KV_HEADS))
    rows = min(CHECKED_ROWS, length)
    k, v = (t.repeat_interleave(Q_HEADS // KV_HEADS, 0) for t in (k, v))
    scores = q[:, :rows] @ k.transpose(1, 2) * HEAD_DIM**-0.5
    if causal:
        later = torch.ones(rows, length, dtype=torch.bool, device=qkv.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    exact = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return float((found[:rows].double() - exact).norm() / exact.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=parse_cases, default=CASES, help="SEQUENCESxLENGTH, separated by commas")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    args = parser.parse_args()

    import torch

    from omniw4 import ops
    from omniw4.bench.environment import environment
    from omniw4.bench.timing import REPETITIONS, WARMUP, measure

    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not ops.attention_kernel_runs(device, HEAD_DIM):
        print("error: the kernel needs a GPU of compute capability 9.0 and `make kernels`", file=sys.stderr)
        return 2
    info = environment(device, warmup=WARMUP, repetitions=REPETITIONS)
    dtype = getattr(torch, args.dtype)
    print(info.line(), file=sys.stderr)
    results: list[dict[str, Any]] = []
    for sequences, length in args.cases:
        calls, qkv = providers(sequences, length, dtype, args.causal)
        timings = {}
        for name, call in calls.items():
            try:
                if name in ("omniw4", "ready"):
                    found = error(call(), qkv, length, args.causal)
                    if not found < 4 * torch.finfo(dtype).eps:
                        print(f"error: {name} at {sequences}x{length} is off by {found:.1e}", file=sys.stderr)
                        return 1
                timings[name] = measure([call] * LAYERS, device)
            except RuntimeError as e:  # a torch without this backend, or a GPU it does not take
                print(f"note: {name} does not run: {str(e).splitlines()[0]}", file=sys.stderr)
        flops = 4 * sequences * Q_HEADS * length**2 * HEAD_DIM / (2 if args.causal else 1)
        results.append(
            {"sequences": sequences, "length": length, "flops": flops}
            | {name: timing.to_dict() for name, timing in timings.items()}
        )
        row = " | ".join(f"{name} {timing.median:.1f} ± {timing.std:.1f}" for name, timing in timings.items())
        tflops = flops / timings["omniw4"].median / 1e6
        print(f"{sequences}x{length} | {row} | {tflops:.0f} TFLOPS")
    if args.json:
        document = {"environment": info.to_dict(), "dtype": args.dtype, "causal": args.causal, "cases": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
