"""Which layout a device gets, for families that are registered and for none."""

from __future__ import annotations

import pytest
import torch

from omniw4 import ops
from omniw4.ops import layouts


def test_the_first_family_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_KERNELS", {})
    gpu = torch.device("cuda", 0)
    assert ops.kernel_layout(gpu, 4) == "canonical"
    ops.register_kernels("first", lambda device, act_bits: act_bits == 4)
    ops.register_kernels("second", lambda device, act_bits: act_bits in (4, 8) and device.index == 0)
    assert [ops.kernel_layout(gpu, bits) for bits in (4, 8, 16)] == ["first", "second", "canonical"]
    assert ops.kernel_layout(torch.device("cuda", 1), 8) == "canonical"
    assert ops.kernel_layout(torch.device("cpu"), 4) == "canonical"


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_activations_of_a_family_are_padded_to_its_tile(tokens: int) -> None:
    shapes = ops.activation_shapes("mma_s4", tokens, 192, 4, torch.float16)
    rows = -(-tokens // 16)
    assert (shapes.qact, shapes.a_scales) == ((rows, 3, 32, 16), (3, 16 * rows))
