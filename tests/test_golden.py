"""The golden linear: known codes, scales and outputs that any reader, quantizer or kernel can be tested against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omniw4 import int4
from omniw4.hadamard import hadamard64
from omniw4.tensors import LinearSpec, QuantizedLinear

PATH = Path(__file__).parent / "golden" / "linear.safetensors"
CASES = [(rotation, smooth, bits) for rotation in ("none", "hadamard64") for smooth in (0, 1) for bits in (4, 8, 16)]


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(PATH)


def transformed(golden: dict[str, torch.Tensor], rotation: str, smooth: int) -> torch.Tensor:
    x = golden["x"].float()
    x = x / golden["smooth"].float() if smooth else x
    return hadamard64(x) if rotation == "hadamard64" else x


def test_codes_and_weight(golden: dict[str, torch.Tensor]) -> None:
    codes = int4.unpack_nibbles(golden["qweight"])
    assert torch.equal(codes, golden["codes"])
    assert torch.equal(int4.pack_nibbles(golden["codes"]), golden["qweight"])
    assert torch.equal(int4.dequantize(codes, golden["w_scales"]), golden["weight"])
    assert (golden["w_scales"] == 0).sum() == 1, "the file is known to hold one group of scale 0"


@pytest.mark.parametrize(("rotation", "smooth", "bits"), [c for c in CASES if c[2] != 16])
def test_activation_codes_and_scales(golden: dict[str, torch.Tensor], rotation: str, smooth: int, bits: int) -> None:
    quantize = int4.quantize_groups if bits == 4 else int4.quantize_tokens
    codes, scales = quantize(transformed(golden, rotation, smooth))
    name = f"{rotation}.smooth{smooth}.a{bits}"
    assert torch.equal(codes, golden[f"{name}.qact"])
    assert torch.equal(scales, golden[f"{name}.a_scales"])


@pytest.mark.parametrize(("rotation", "smooth", "bits"), CASES)
def test_output(golden: dict[str, torch.Tensor], rotation: str, smooth: int, bits: int) -> None:
    x = transformed(golden, rotation, smooth).double()
    name = f"{rotation}.smooth{smooth}.a{bits}"
    acts = x if bits == 16 else int4.dequantize(golden[f"{name}.qact"], golden[f"{name}.a_scales"], torch.float64)
    lora = x @ golden["proj_down"].double() @ golden["proj_up"].double().T
    y = acts @ golden["weight"].double().T + lora + golden["bias"].double()
    assert (y - golden[f"{name}.y"]).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize("rotation", ["none", "hadamard64"])
@pytest.mark.parametrize("smooth", [0, 1])
def test_dequantized_weight_gives_the_unquantized_output(
    golden: dict[str, torch.Tensor], rotation: str, smooth: int
) -> None:
    """QuantizedLinear.dequantize folds rotation, smoothing and the low-rank branch back into the model's own space."""
    linear = QuantizedLinear(
        LinearSpec(act_bits=16, rotation=rotation, smooth=bool(smooth)),  # type: ignore[arg-type]
        golden["qweight"],
        golden["w_scales"],
        golden["proj_down"],
        golden["proj_up"],
        golden["smooth"] if smooth else None,
        golden["bias"],
    )
    y = golden["x"].double() @ linear.dequantize(torch.float64).T + golden["bias"].double()
    wanted = golden[f"{rotation}.smooth{smooth}.a16.y"]
    assert (y - wanted).norm() <= 1e-6 * y.norm()
