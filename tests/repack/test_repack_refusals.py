"""The layout that holds FP16 scales alone refuses integer ones by name, before anything is moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_samples import random_linear

from omniw4 import repack
from omniw4.errors import LayoutError
from omniw4.tensors import LinearSpec, QuantizedLinear


def integer_linear() -> QuantizedLinear:
    linear = random_linear(24, 192)
    spec = replace(linear.spec, scale_type="integer")
    return replace(linear, spec=spec, w_scales=torch.ones(24, 3, dtype=torch.uint8), row_scales=torch.ones(24))


def test_integer_scales_are_refused() -> None:
    layout, linear = repack.get("mma_s4"), integer_linear()
    assert layout.unsupported(linear.spec) == "mma_s4 holds no integer group scales"
    with pytest.raises(LayoutError, match="mma_s4 holds no integer group scales") as refused:
        layout.pack(linear)
    assert "mma_s8" in refused.value.hint


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_auto_takes_the_layout_that_holds_them(capability: tuple[int, int] | None) -> None:
    integer, eight_bits = LinearSpec(scale_type="integer"), LinearSpec(act_bits=8)
    for specs in ([integer], [eight_bits], [integer, eight_bits]):
        assert repack.auto(capability, specs) == "mma_s8"
        assert "auto chose mma_s8: " in repack.explain_auto(capability, specs)
        assert repack.auto((9, 0), specs) == "wgmma_s8"
    native = capability in ((8, 0), (8, 6), (8, 9))
    assert repack.auto(capability, [eight_bits, LinearSpec()]) == ("mma_s4" if native else "mma_s8")


@pytest.mark.parametrize("name", repack.LAYOUTS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_scales": None}, "row_scales is missing although the scale type is integer"),
        ({"row_scales": torch.ones(23)}, r"row_scales has shape \[23\], wanted \[24\]"),
        ({"row_scales": torch.ones(24).half()}, "row_scales has dtype torch.float16, wanted torch.float32"),
        ({"w_scales": torch.ones(24, 3).half()}, "w_scales has dtype torch.float16, wanted torch.uint8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        repack.get(name).pack(replace(integer_linear(), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", repack.LAYOUTS)
def test_row_scales_beside_float16_scales_are_refused(name: str) -> None:
    linear = replace(random_linear(24, 192), row_scales=torch.ones(24))
    with pytest.raises(LayoutError, match="row_scales is there although the scale type is float16"):
        repack.get(name).pack(linear)
