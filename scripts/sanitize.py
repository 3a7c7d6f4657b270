"""compute-sanitizer over a small set of kernel calls: memcheck, racecheck, initcheck, synccheck. Needs a GPU.

Each tool runs this file again with ``--calls``. torch's caching allocator is off there, so that every tensor is an
allocation of its own and a read past its end is seen; inputs are made on the CPU and copied, so that initcheck knows
them as written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 86  # exit code of a run in which the tool reported something
# M, N, K, R: a small tile with tails and an odd number of groups; a large tile with tails; heads
LINEARS = ((5, 72, 192, 16), (129, 2504, 192, 48), (17, 256, 64, 0))


def calls() -> None:
    """Every kernel at least once, in both dtypes."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("src", "tests")]
    import torch

    from omniw4 import ops, repack
    from problems import make_input, make_linear

    device = torch.device("cuda", 0)
    for dtype in (torch.float16, torch.bfloat16):
        for m, n, k, rank in LINEARS:
            linear = make_linear(n, k, rank, dtype=dtype)
            packed = {name: tensor.to(device) for name, tensor in repack.get("mma_s4").pack(linear).items()}
            x = make_input(m, k, dtype)
            weight, residual = torch.ones(k, dtype=dtype).to(device), torch.ones(m, n, dtype=dtype).to(device)
            smooth = torch.full((k,), 0.5).to(device)
            rms, x = ops.inv_rms_ref(x, 1e-6).to(device), x.to(device)
            ops.inv_rms(x, 1e-6)
            down, up = packed.get("proj_down"), packed.get("proj_up")
            for act_bits, layout in ((4, "canonical"), (8, "canonical"), (16, "canonical"), (8, "mma_s8")):
                ops.quantize_lora_down(x, down, smooth, rms, weight, "hadamard64", act_bits, 0.95, layout)
            qact, scales, low, _ = ops.quantize_lora_down(x, down, smooth, None, None, "hadamard64", 4, 0.95, "mma_s4")
            bias = packed["bias"][:n].clone()
            variants = [low, ops.pack_lora_act(low, dtype)] if rank else [None]
            for lora_act in variants:
                for epilogue in ("plain", "residual", "swiglu"):
                    y = ops.gemm_lora_up(
                        qact, scales, packed["qweight"], packed["w_scales"], lora_act, up, bias,
                        residual if epilogue == "residual" else None, m, n, 4, epilogue, dtype, "mma_s4",
                    )  # fmt: skip
                    assert y.cpu().isfinite().all()
        for layout in ("mma_s4", "mma_s8"):
            heads(dtype, device, layout)
        attention(dtype, device)
        widened(dtype, device)
        hopper(dtype, device)
    columns(device)
    torch.cuda.synchronize()
    print("every call came back")


def columns(device: object) -> None:
    """The quantizer's op, with rows that fill no block."""
    from column_cases import make_columns
    from omniw4 import ops

    for from_codes in (False, True):
        for tensor in ops.round_columns(*make_columns(2, 65, from_codes, device)):  # type: ignore[arg-type]
            assert tensor.cpu().isfinite().all()


def heads(dtype: object, device: object, layout: str) -> None:
    import torch

    from omniw4 import ops, repack
    from problems import make_input, make_linear

    for m, q_heads, kv_heads, head_dim in ((5, 2, 1, 64), (130, 24, 8, 128)):
        n = (q_heads + 2 * kv_heads) * head_dim
        linear = make_linear(n, 64, 16, dtype=dtype)  # type: ignore[arg-type]
        packed = {name: tensor.to(device) for name, tensor in repack.get(layout).pack(linear).items()}
        cos, sin = (table.to(device) for table in ops.rope_tables(64, head_dim, 1e6))
        positions = (torch.arange(m) % 64).to(device)
        weight = torch.ones(head_dim, dtype=dtype).to(device)  # type: ignore[call-overload]
        tables = (weight, weight, cos, sin, positions)
        qkv = make_input(m, n, dtype).to(device)  # type: ignore[arg-type]
        ops.qknorm_rope(qkv, *tables, q_heads, kv_heads, head_dim, 1e-6)
        x = make_input(m, 64, dtype).to(device)  # type: ignore[arg-type]
        acts = ops.quantize_lora_down(x, packed["proj_down"], None, None, None, "none", 4, 1.0, layout)
        y = ops.gemm_qknorm_rope(
            acts[0], acts[1], packed["qweight"], packed["w_scales"], acts[2], packed["proj_up"], None, *tables,
            q_heads, kv_heads, head_dim, 1e-6, m, 4, dtype, layout,
        )  # fmt: skip
        assert y.cpu().isfinite().all()


def attention(dtype: object, device: object) -> None:
    """Sequences of one row, of a tile and one more, and empty ones; rows of no sequence; both head sizes."""
    import torch

    from omniw4 import ops
    from problems import make_input

    cu_seqlens = torch.tensor([2, 3, 3, 68, 133, 150], dtype=torch.int32).to(device)
    for q_heads, kv_heads, head_dim in ((4, 2, 128), (3, 1, 64)):
        if not ops.attention_kernel_runs(device, head_dim):  # type: ignore[arg-type]
            continue
        qkv = make_input(153, (q_heads + 2 * kv_heads) * head_dim, dtype).to(device)  # type: ignore[arg-type]
        for causal in (False, True):
            y = ops.attention_varlen(qkv, cu_seqlens, 65, q_heads, kv_heads, head_dim, causal, head_dim**-0.5)
            assert y.cpu().isfinite().all()


def with_scales(linear: Any, scale_type: str) -> Any:
    from dataclasses import replace

    import torch

    if scale_type == "float16":
        return linear
    whole = torch.full_like(linear.w_scales, 3, dtype=torch.uint8)
    spec, rows = replace(linear.spec, scale_type="integer"), torch.full((linear.out_features,), 1e-3)
    return replace(linear, spec=spec, w_scales=whole, row_scales=rows)


def widened(dtype: object, device: object) -> None:
    """Family mma_s8: both kinds of group scales, both widths of activations, every tile, every epilogue but heads."""
    import torch

    from omniw4 import ops
    from omniw4.ops import gemm_mma_s8
    from omniw4.repack import mma_s8
    from problems import make_input, make_linear

    for m, n, k, rank in LINEARS:
        x, norm = make_input(m, k, dtype).to(device), torch.ones(k, dtype=dtype).to(device)  # type: ignore[arg-type, call-overload]
        residual = torch.ones(m, n, dtype=dtype).to(device)  # type: ignore[call-overload]
        for scale_type in ("float16", "integer"):
            linear = with_scales(make_linear(n, k, rank, dtype=dtype), scale_type)  # type: ignore[arg-type]
            packed = {name: tensor.to(device) for name, tensor in mma_s8.pack(linear).items()}
            bias = packed["bias"][:n].clone()
            for bits in (4, 8):
                acts = ops.quantize_lora_down(
                    x, packed.get("proj_down"), None, None, norm, "hadamard64", bits, 0.95, "mma_s8", scale_type, 1e-6
                )
                for tile in (16, 64, 128):
                    for epilogue in ("plain", "residual", "swiglu"):
                        y = gemm_mma_s8.gemm(
                            "sanitize", acts[0], acts[1], packed["qweight"], packed["w_scales"],
                            acts[2] if rank else None, packed.get("proj_up"), bias,
                            residual if epilogue == "residual" else None, m, n, bits, epilogue, dtype, tile,  # type: ignore[arg-type]
                            packed.get("row_scales"),
                        )  # fmt: skip
                        assert y.cpu().isfinite().all()


def hopper(dtype: object, device: object) -> None:
    """Family wgmma_s8 where it runs: both kinds of group scales, every tile, every epilogue, several tiles a block."""
    import torch

    from omniw4 import ops
    from omniw4.ops import extension, gemm_wgmma_s8
    from omniw4.repack import wgmma_s8
    from problems import make_input, make_linear

    if not gemm_wgmma_s8.runs(device, 4):  # type: ignore[arg-type]
        return
    for m, n, k, rank in (*LINEARS, (140, 1032, 128, 16)):
        x, norm = make_input(m, k, dtype).to(device), torch.ones(k, dtype=dtype).to(device)  # type: ignore[arg-type, call-overload]
        residual = torch.ones(m, n, dtype=dtype).to(device)  # type: ignore[call-overload]
        for scale_type, tiles in (("float16", 5), ("integer", len(extension.module().integer_tiles()))):
            linear = with_scales(make_linear(n, k, rank, dtype=dtype), scale_type)  # type: ignore[arg-type]
            packed = {name: tensor.to(device) for name, tensor in wgmma_s8.pack(linear).items()}
            bias, up = packed["bias"][:n].clone(), packed.get("proj_up")
            for bits in (4, 8):
                acts = ops.quantize_lora_down(
                    x, packed.get("proj_down"), None, None, norm, "hadamard64", bits, 0.95, "wgmma_s8", scale_type, 1e-6
                )
                for tile in range(1, tiles + 1):
                    if scale_type == "float16" and tile == 4 and -(-n // 128) % 2:
                        continue  # 256 features
                    for epilogue in ("plain", "residual", "swiglu"):
                        y = gemm_wgmma_s8.gemm(
                            "sanitize", acts[0], acts[1], packed["qweight"], packed["w_scales"],
                            acts[2] if rank else None, up, bias, residual if epilogue == "residual" else None, m, n,
                            bits, epilogue, dtype, tile, packed.get("row_scales"), weights_ready=bits == 4,  # type: ignore[arg-type]
                        )  # fmt: skip
                        assert y.cpu().isfinite().all()
    for m, k, rank in ((300, 320, 48), (800, 2112, 16), (2400, 1088, 16)):  # blocks of whole rows: three kinds
        down = wgmma_s8.pack_proj_down(make_input(k, rank, dtype)).to(device)  # type: ignore[arg-type]
        x, norm = make_input(m, k, dtype).to(device), torch.ones(k, dtype=dtype).to(device)  # type: ignore[arg-type, call-overload]
        for of in (norm, None):
            acts = ops.quantize_lora_down(
                x, down, None, None, of, "hadamard64", 4, 0.95, "wgmma_s8", "integer", 1e-6, weights_ready=of is None
            )
            assert acts[1].cpu().isfinite().all()


def control() -> None:
    """A call that lies about its sizes: the sanitizer must see it, or its silence on the others means nothing."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    import torch

    from omniw4.ops import extension

    device = torch.device("cuda", 0)
    x, out = torch.ones(4, 64, dtype=torch.float16).to(device), torch.empty(4, device=device)
    extension.loaded(device).inv_rms(
        x=x.data_ptr(), out=out.data_ptr(), rows=1 << 16, cols=64, row_stride=64, eps=1e-6, dtype="float16", device=0,
        stream=0,
    )  # fmt: skip
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", action="store_true", help="make the calls, without a tool")
    parser.add_argument("--control", action="store_true", help="make one call that is wrong, without a tool")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    args = parser.parse_args()
    if args.calls or args.control:
        calls() if args.calls else control()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        print("error: compute-sanitizer is not on PATH\n\nhint: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    verdicts: dict[str, dict[str, Any]] = {}
    for name, tool, what in (("control", "memcheck", "--control"), *((tool, tool, "--calls") for tool in args.tools)):
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            "--kernel-name",
            "kernel_substring=omniw4",
        ]
        started = time.monotonic()
        done = subprocess.run(
            [*command, sys.executable, __file__, what], env=environment, capture_output=True, text=True, check=False
        )
        output = done.stdout + done.stderr
        sees_it = done.returncode != 0 and "Invalid __global__" in output and "inv_rms" in output
        passed = sees_it if name == "control" else done.returncode == 0
        verdicts[name] = {"passed": passed, "seconds": round(time.monotonic() - started, 1)}
        verdict = ("a wrong call is seen" if passed else "a wrong call goes unseen") if name == "control" else ""
        print(f"{name}: {verdict or ('clean' if passed else 'NOT clean')} · {verdicts[name]['seconds']} s")
        if not passed:
            verdicts[name]["output"] = output[-6000:]
            print(verdicts[name]["output"])
        if args.json:
            args.json.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    return 0 if all(v["passed"] for v in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
