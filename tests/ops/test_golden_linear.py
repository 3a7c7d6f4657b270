"""All twelve variants of the golden linear through the ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omniw4 import int4, ops
from problems import assert_same, relative_error

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
@pytest.mark.parametrize("smooth", [0, 1])
@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
def test_golden(rotation: str, smooth: int, act_bits: int, dtype: torch.dtype) -> None:
    golden = load_file(GOLDEN)
    case = f"{rotation}.smooth{smooth}.a{act_bits}"
    inv_smooth = golden["smooth"].float().reciprocal() if smooth else None
    qact, a_scales, lora_act, _ = ops.quantize_lora_down(
        golden["x"].to(dtype), golden["proj_down"], inv_smooth, None, None, rotation, act_bits, 1.0, "canonical"
    )
    y = ops.gemm_lora_up(
        qact, a_scales, golden["qweight"], golden["w_scales"], lora_act, golden["proj_up"], golden["bias"], None,
        5, 24, act_bits, "plain", dtype, "canonical",
    )  # fmt: skip
    if act_bits != 16:
        codes = int4.unpack_nibbles(qact) if act_bits == 4 else qact
        assert_same(codes, golden[f"{case}.qact"], f"{case}.qact")
        assert_same(a_scales, golden[f"{case}.a_scales"], f"{case}.a_scales")
    assert relative_error(y, golden[f"{case}.y"]) < (1e-3 if dtype == torch.float16 else 1e-6)
