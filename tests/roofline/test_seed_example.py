"""The worked example this project started from: q_proj of OmniVoice at 700 tokens on an L4, and where it was off.

It said: 2.94 GFLOP, 8.2 MB, 358 FLOP/byte; FP16 27 µs, W4A4 14 µs; W4A4 at 485 TOPS; and that 82 µs measured in FP16
are 0.002 % of 120 TFLOPS.
"""

from __future__ import annotations

import pytest

from omniw4 import roofline
from omniw4.roofline import cost

M, N, K = 700, 2048, 1024
L4 = roofline.get("L4")


def fp16() -> cost.Kernel:
    (kernel,) = cost.linear(L4, "fp16", M, N, K)
    return kernel


def test_the_operations_are_right() -> None:
    assert sum(fp16().ops.values()) == 2 * M * N * K == pytest.approx(2.94e9, rel=2e-3)


def test_the_bytes_were_rounded_in_two_units() -> None:
    """1.4 MB of X + 4 MiB of W + 2.8 MB of Y make its 8.2; in one unit it is 8.50 MB, or 8.10 MiB."""
    x, w, y = 2 * M * K, 2 * N * K, 2 * M * N
    assert fp16().bytes == x + w + y == 8_495_104
    seed_mb = int(x / 1e5) / 10 + w / 2**20 + int(y / 1e5) / 10
    assert seed_mb == pytest.approx(8.2)
    assert 2.94e9 / (seed_mb * 1e6) == pytest.approx(358, rel=2e-3)
    assert sum(fp16().ops.values()) / fp16().bytes == pytest.approx(345.6, rel=1e-3)


def test_fp16_is_bound_by_memory_at_27_us() -> None:
    """8.2 MB at 300 GB/s; 28.3 µs with all bytes. Compute alone takes 24 µs: the ridge point of 403 is near."""
    assert 8.2e6 / L4.memory_gbs * 1e-3 == pytest.approx(27.3, rel=2e-3)
    assert fp16().ideal_us(L4) == fp16().memory_us(L4) == pytest.approx(28.3, rel=2e-3)
    assert fp16().compute_us(L4) == pytest.approx(24.3, rel=5e-3)
    assert L4.ridge("fp16") == pytest.approx(403, rel=1e-3)


def test_w4a4_at_14_us_leaves_out_scales_low_rank_branch_and_quantizer() -> None:
    bare = M * K // 2 + N * K // 2 + 2 * M * N
    assert bare / L4.memory_gbs * 1e-3 == pytest.approx(14, rel=0.02)
    quantize, gemm = cost.linear(L4, "w4a4", M, N, K, rank=16)
    left_out = 2 * (M * K // 64 + N * K // 64) + 4 * M * 16 + 2 * N * 16
    assert gemm.bytes == bare + left_out
    assert gemm.ideal_us(L4) == pytest.approx(14.9, rel=2e-3)
    assert quantize.ideal_us(L4) == pytest.approx(6.3, rel=2e-3)  # X is read in 16 bits, whatever comes after
    whole = quantize.ideal_us(L4) + gemm.ideal_us(L4)
    assert fp16().ideal_us(L4) / whole == pytest.approx(1.33, rel=5e-3)  # and not 27 / 14 = 1.93


def test_485_tops_is_a_sparse_int8_rate_and_by_chance_the_dense_int4_rate() -> None:
    assert L4.rates["int8"] == 485 / 2
    assert L4.rates["int4"] == 2 * (L4.rates["int8"] or 0)
    _, gemm = cost.linear(L4, "w4a4", M, N, K, rank=16)
    assert gemm.compute_us(L4) < gemm.memory_us(L4)  # so at this shape the rate does not decide


def test_82_us_are_30_percent_of_the_peak() -> None:
    achieved = 2.94e9 / 82e-6
    assert achieved / 120e12 == pytest.approx(0.30, abs=0.005)
