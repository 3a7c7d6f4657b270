"""Finite scan and repack identity, each with planted damage."""

import pytest
from random_linears import quantized

from omniw4 import repack
from omniw4.verify.integrity import first_difference, non_finite, repack_losses


def test_finite_scan_names_the_tensors():
    _, linear = quantized()
    assert non_finite(linear) == []
    linear.w_scales[3, 1] = float("inf")
    linear.proj_up[0, 0] = float("nan")
    assert non_finite(linear) == ["w_scales", "proj_up"]


@pytest.mark.parametrize("shape", [(24, 64, 0), (8, 192, 16), (130, 128, 24)])
def test_every_layout_gives_the_linear_back(shape):
    n, k, rank = shape
    _, linear = quantized(n=n, k=k, rank=min(rank, n))
    assert repack_losses(linear, repack.LAYOUTS) == {}


def test_a_layout_that_loses_something_is_named(monkeypatch):
    _, linear = quantized()
    original = repack.LAYOUTS["mma_s8"].unpack

    def lossy(packed, spec, n, k):
        back = original(packed, spec, n, k)
        back.qweight[5, 7] ^= 1
        return back

    monkeypatch.setattr(repack.LAYOUTS["mma_s8"], "unpack", lossy)
    assert repack_losses(linear, repack.LAYOUTS) == {"mma_s8": "qweight[5, 7]"}


def test_differences_are_of_bits_not_of_numbers():
    _, a = quantized()
    _, b = quantized()
    assert first_difference(a, b) == ""
    a.w_scales[0, 0] = 0.0
    b.w_scales[0, 0] = -0.0
    assert first_difference(a, b) == "w_scales[0, 0]"
    a.w_scales[0, 0] = b.w_scales[0, 0] = float("nan")
    assert first_difference(a, b) == ""
    b.proj_up = b.proj_up.float()
    assert "float32" in first_difference(a, b)
    b.proj_up = None
    assert "proj_up" in first_difference(a, b)
