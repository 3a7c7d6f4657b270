"""What a trace adds up to, on traces small enough to add up by hand."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from omniw4.profile import trace
from omniw4.profile.kinds import KINDS, kind_of
from omniw4.profile.result import EngineProfile

Event = dict[str, Any]


def event(cat: str, name: str, start: float, end: float, tid: int = 1) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


def step(start: float, end: float) -> Event:
    return event("user_annotation", trace.STEP, start, end)


GPU = [
    step(0, 100),
    event("kernel", "nvjet_hsh_128x64", 10, 30, 7),
    event("kernel", "elementwise_kernel<silu>", 25, 40, 8),  # overlaps, on another stream
    event("gpu_memcpy", "Memcpy HtoD", 60, 65, 7),
    event("kernel", "nvjet_hsh_128x64", 90, 100, 7),
    event("cuda_runtime", "cudaLaunchKernel", 5, 8),
    event("cuda_runtime", "cudaMemcpyAsync", 50, 54),
    event("cuda_runtime", "cudaStreamSynchronize", 54, 100),
    event("python_function", "model.py(1): forward", 0, 100),
    event("python_function", "nn.Module: Qwen3MLP_0", 41, 80),
    event("python_function", "<built-in method item of Tensor object at 0x7f0001>", 42, 58),
    event("python_function", "model.py(9): embed", 66, 88),
    event("python_function", "torch/profiler/profiler.py(3): step", 66, 88),
]


def test_busy_time_counts_overlap_once() -> None:
    work = trace.device_work(GPU)
    assert work[0].name == "nvjet_hsh_128x64"
    assert trace.busy_us(work) == 30 + 5 + 10


def test_the_breakdown_sums_durations_and_calls() -> None:
    rows = {row.kind: row for row in trace.breakdown(trace.device_work(GPU), count=2)}
    assert rows["GEMM"].ms == pytest.approx(0.015)  # 30 µs over two steps
    assert (rows["GEMM"].count, rows["GEMM"].mean_us) == (1, 15)
    assert rows["GEMM"].share == pytest.approx(30 / 50)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert trace.longest_kernels(trace.device_work(GPU), 2, 1)[0].name == "nvjet_hsh_128x64"


def test_only_calls_that_start_work_are_launches() -> None:
    assert [span.name for span in trace.launches(GPU)] == ["cudaLaunchKernel", "cudaMemcpyAsync"]


def test_gaps_name_the_kernels_around_and_the_python_inside() -> None:
    gaps = trace.longest_gaps(trace.device_work(GPU), GPU, shown=5)
    assert [gap.us for gap in gaps] == [25, 20]
    assert (gaps[0].after, gaps[0].before) == ("Memcpy HtoD", "nvjet_hsh_128x64")
    assert gaps[0].python == ("model.py(9): embed", "model.py(1): forward", "nn.Module: Qwen3MLP_0")
    assert gaps[1].python[0] == "<built-in method item>"


def test_time_between_steps_is_no_gap() -> None:
    events = [step(0, 50), step(500, 550), event("kernel", "a", 0, 50, 7), event("kernel", "b", 500, 550, 7)]
    assert trace.longest_gaps(trace.device_work(events), events, shown=5) == []


CPU = [
    step(0, 100),
    event("cpu_op", "aten::linear", 10, 50),
    event("cpu_op", "aten::t", 12, 14),
    event("cpu_op", "aten::mm", 20, 45),
    event("cpu_op", "omniw4::inv_rms", 60, 90),
    event("cpu_op", "aten::pow", 65, 70),
    event("cpu_op", "aten::mm", 0, 100, 2),  # of another thread
]


def test_an_operator_keeps_its_own_time_only() -> None:
    work = trace.operator_work(CPU)
    own: dict[str, float] = {}
    for span in work:
        own[span.name] = own.get(span.name, 0) + span.us
    assert own == {"aten::linear": 13, "aten::t": 2, "aten::mm": 25, "omniw4::inv_rms": 30}
    assert trace.busy_us(work) == 70
    assert sum(span.call for span in work) == 4, "pieces of a call are one call"
    assert all(a.end <= b.start for a, b in pairwise(work))


def test_an_operator_that_only_calls_others_still_counts() -> None:
    events = [step(0, 10), event("cpu_op", "aten::linear", 0, 10), event("cpu_op", "aten::mm", 0, 10)]
    assert {span.name: span.us for span in trace.operator_work(events)} == {"aten::mm": 10, "aten::linear": 0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_192x128_64x5_2x1_v_bz_TNN", "GEMM"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("void gemm::sm90a::gemm_lora_up_kernel<__half, Tile<2, 1, 128>>", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>", "GEMM"),
        ("aten::_scaled_mm", "GEMM"), ("aten::mkldnn_convolution", "GEMM"), ("aten::_slow_conv2d_forward", "GEMM"),
        ("aten::convert", "other"), ("aten::addmm", "GEMM"),
        ("void quantize::quantize_lora_down_kernel<4>", "quantize"), ("omniw4::quantize_fp8", "quantize"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x128", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "memory"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>", "memory"),
        ("Memcpy DtoD (Device -> Device)", "memory"), ("Memset (Device)", "memory"),
        ("void at::native::reduce_kernel<512, 1, MeanOps>", "reduce"), ("rms_norm_kernel<__half>", "reduce"),
        ("triton_poi_fused_add_mul_silu_3", "elementwise"), ("triton_red_fused_mean_pow_1", "reduce"),
        ("aten::mul", "elementwise"), ("aten::transpose", "memory"), ("something_nobody_knows", "other"),
    ],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in KINDS


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    for name, opener in (("a.json", open), ("a.json.gz", gzip.open)):
        with opener(tmp_path / name, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": GPU}, file)
        assert trace.load(tmp_path / name) == GPU


def test_idle_time_is_what_the_step_takes_beside_its_kernels() -> None:
    def engine(step_ms: float, busy_ms: float, launches: float, us: float | None) -> EngineProfile:
        return EngineProfile("x", "cuda", step_ms, 0.0, busy_ms, 3000, launches, us, [], [], [])

    slow = engine(20, 5, 2000, 4.0)
    assert (slow.idle_ms, slow.idle_share, slow.launch_ms) == (15, 0.75, 8.0)
    assert engine(2, 2.5, 1, None).idle_ms == 0
    assert engine(2, 2.5, 1, None).launch_ms is None
