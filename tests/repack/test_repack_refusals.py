"""Layouts that hold FP16 scales alone refuse integer ones by name, before anything is moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_samples import random_linear

from omniw4 import repack
from omniw4.errors import LayoutError
from omniw4.tensors import QuantizedLinear


def integer_linear() -> QuantizedLinear:
    linear = random_linear(24, 192)
    spec = replace(linear.spec, scale_type="integer")
    return replace(linear, spec=spec, w_scales=torch.ones(24, 3, dtype=torch.uint8), row_scales=torch.ones(24))


@pytest.mark.parametrize("name", ["mma_s4", "mma_s8"])
def test_integer_scales_are_refused(name: str) -> None:
    layout, linear = repack.get(name), integer_linear()
    assert layout.unsupported(linear.spec) == f"{name} holds no integer group scales yet"
    with pytest.raises(LayoutError, match=f"{name} holds no integer group scales yet"):
        layout.pack(linear)


def test_auto_takes_the_layout_that_holds_them() -> None:
    assert repack.auto(None, "integer") == repack.auto((9, 0), "integer") == "wgmma_s8"
    assert repack.explain_auto(None, "integer") == "auto chose wgmma_s8: the one layout that holds integer group scales"
    with pytest.raises(LayoutError, match=r"capability 8\.6 holds integer group scales yet") as refused:
        repack.auto((8, 6), "integer")
    assert "--config float16" in refused.value.hint


@pytest.mark.parametrize("name", ["mma_s4", "wgmma_s8"])
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
