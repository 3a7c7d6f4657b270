"""The quantizer on a GPU: as good with the kernels as without them, and the same numbers every time."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import inputs, stats_of, weights

from omniw4.config import Recipe
from omniw4.ops import cuda_rows
from omniw4.quantize.layer import Linear, quantize_groups
from omniw4.tensors import LinearSpec

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_linears_are_as_good_as_without_the_kernel(monkeypatch: pytest.MonkeyPatch, scale_type: str) -> None:
    recipe = Recipe.model_validate({"gptq": {"sweeps": 2}, "weights": {"scale_type": scale_type, "scale": "search"}})
    spec = LinearSpec(rank=16, scale_type=scale_type)  # type: ignore[arg-type]
    groups = [[Linear(f"{b}", weights(96, 256, seed=b).to(DEVICE), None, spec)] for b in range(3)]
    stats = [stats_of(inputs(900, 256, seed=b).to(DEVICE)) for b in range(3)]

    def errors() -> list[float]:
        return [results[0][1].relative_error for results in quantize_groups(groups, stats, recipe)]

    found = errors()
    assert found == errors()
    monkeypatch.setattr(cuda_rows.extension, "usable", lambda device: False)
    for mine, plain in zip(found, errors(), strict=True):
        assert mine == pytest.approx(plain, rel=0.03)
