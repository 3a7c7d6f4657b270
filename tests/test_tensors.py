"""QuantizedLinear: names, sizes, effective bits."""

from __future__ import annotations

import json

import pytest
import torch

from omniw4 import int4
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear


def linear(n: int, k: int, rank: int, *, bias: bool = False, smooth: bool = False) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    codes, scales = int4.quantize_groups(torch.randn(n, k, generator=generator))
    return QuantizedLinear(
        LinearSpec(rank=rank, smooth=smooth),
        int4.pack_nibbles(codes),
        scales,
        torch.randn(k, rank, generator=generator).half() if rank else None,
        torch.randn(n, rank, generator=generator).half() if rank else None,
        torch.rand(k, generator=generator).half() + 0.5 if smooth else None,
        torch.randn(n, generator=generator).half() if bias else None,
    )


def test_features_and_names() -> None:
    q = linear(24, 192, 16, bias=True, smooth=True)
    assert (q.out_features, q.in_features) == (24, 192)
    assert list(q.tensors()) == ["qweight", "w_scales", "proj_down", "proj_up", "smooth", "bias"]
    assert list(linear(24, 192, 0).tensors()) == ["qweight", "w_scales"]


@pytest.mark.parametrize(("n", "k", "rank"), [(64, 64, 0), (24, 192, 16), (2048, 1024, 16), (100, 64, 256)])
@pytest.mark.parametrize("smooth", [False, True])
def test_effective_bits_by_hand(n: int, k: int, rank: int, smooth: bool) -> None:
    """4 bits a code, 16 bits a group of 64, 16 bits an entry of the low-rank branch; the bias is not counted."""
    wanted = 4 + 16 / 64 + 16 * rank * (n + k) / (n * k) + (16 / n if smooth else 0)
    assert linear(n, k, rank, bias=True, smooth=smooth).effective_bits() == pytest.approx(wanted)


def test_dequantize_without_branch_or_rotation() -> None:
    q = linear(8, 128, 0)
    plain = QuantizedLinear(LinearSpec(rank=0, rotation="none"), q.qweight, q.w_scales)
    wanted = int4.unpack_nibbles(q.qweight).double().reshape(8, 2, 64) * q.w_scales.double()[..., None]
    assert torch.equal(plain.dequantize(torch.float64), wanted.reshape(8, 128))


def test_to_moves_every_tensor() -> None:
    moved = linear(8, 64, 16, bias=True, smooth=True).to("meta")
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}


def test_reports_and_specs_are_plain_json() -> None:
    report = LayerReport("a.b", 8, 64, "gptq", 0.01, 20.0, 0.01, 0.4, rounds=[0.02, 0.01], best_round=1, rtn_error=0.02)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert LinearSpec(**json.loads(json.dumps(LinearSpec(rank=32).to_dict()))) == LinearSpec(rank=32)
