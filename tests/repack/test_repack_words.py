"""What layouts say to a user, and what the header of a cache file may hold: small things, each in full."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from linear_samples import assert_same_linear, random_linear

from omniw4 import repack
from omniw4.repack import layouts
from omniw4.repack.cache_header import Header
from omniw4.tensors import LinearSpec, QuantizedLinear

INTEGER = LinearSpec(scale_type="integer")
EIGHT, SIXTEEN = LinearSpec(act_bits=8), LinearSpec(act_bits=16)


@pytest.mark.parametrize(
    ("capability", "specs", "why"),
    [
        ((8, 6), [LinearSpec()], "mma_s4: a GPU of compute capability 8.6 multiplies INT4 natively"),
        ((8, 6), [INTEGER], "mma_s8: a GPU of compute capability 8.6 multiplies these linears as INT8"),
        ((12, 0), [LinearSpec()], "mma_s8: a GPU of compute capability 12.0 multiplies INT8 natively and INT4 not"),
        ((9, 0), [LinearSpec()], "wgmma_s8: a GPU of compute capability 9.0 has warpgroup MMA"),
    ],
)
def test_auto_gives_its_reason(capability: tuple[int, int], specs: list[LinearSpec], why: str) -> None:
    assert repack.explain_auto(capability, specs) == f"auto chose {why}"


@pytest.mark.parametrize(
    ("specs", "hint"),
    [
        ([LinearSpec()], "give --layout mma_s4 or --layout mma_s8 or --layout wgmma_s8"),
        ([INTEGER], "give --layout mma_s8 or --layout wgmma_s8"),
        ([SIXTEEN, EIGHT], "give --layout mma_s8 or --layout wgmma_s8"),
        ([SIXTEEN], "omniw4 runs such linears from the canonical tensors, without repacking"),
        ([], "omniw4 runs such linears from the canonical tensors, without repacking"),
    ],
)
def test_the_layouts_that_fit_are_named(specs: list[LinearSpec], hint: str) -> None:
    assert layouts.what_fits(specs) == hint


GOLDEN = {  # version, and SHA-256 of what the linear of the test packs to
    "mma_s4": (1, "cfe8810f1e55e3fa"),
    "mma_s8": (1, "c28c465fd0c31d17"),
    "wgmma_s8": (3, "88be29b010b54c5a"),
}


@pytest.mark.parametrize("name", repack.LAYOUTS)
def test_bytes_and_version_change_together(name: str) -> None:
    """A cache is known by the version: other bytes under the same one would be read as if they were the old."""
    n, k, rank = 72, 128, 8
    linear = QuantizedLinear(
        LinearSpec(rank=rank, smooth=True),
        (torch.arange(n * k // 2) * 37 % 251).reshape(n, k // 2).byte(),
        (torch.arange(n * k // 64) % 63 / 64).reshape(n, k // 64).half(),
        (torch.arange(k * rank) % 101 / 8).reshape(k, rank).half(),
        (torch.arange(n * rank) % 103 / 8).reshape(n, rank).half(),
        (torch.arange(k) / 4).half(),
        (torch.arange(n) / 2).half(),
    )
    digest = hashlib.sha256()
    for part, tensor in sorted(repack.get(name).pack(linear).items()):
        digest.update(
            f"{part} {list(tensor.shape)} ".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        )
    assert (repack.get(name).VERSION, digest.hexdigest()[:16]) == GOLDEN[name]


@pytest.mark.parametrize("name", repack.LAYOUTS)
def test_a_branch_that_the_rank_denies_is_not_unpacked(name: str) -> None:
    layout, linear = repack.get(name), random_linear(24, 64, 0)
    packed = layout.pack(linear)
    branch = {"proj_up": torch.ones(3), "proj_down": torch.ones(3)}
    assert_same_linear(layout.unpack({**packed, **branch}, linear.spec, 24, 64), linear)


def header(**dtypes: str) -> dict[str, Any]:
    return {"spec": INTEGER.to_dict(), "out_features": 24, "in_features": 64, "dtypes": dtypes}


def test_a_header_may_have_every_tensor_in_every_dtype() -> None:
    data = header(
        qweight="uint8",
        w_scales="uint8",
        row_scales="float32",
        proj_down="bfloat16",
        proj_up="bfloat16",
        bias="float16",
    )
    assert Header.from_dict(data).to_dict() == data
    every = header(**dict.fromkeys(("qweight", "w_scales", "row_scales"), "uint8"))
    every["dtypes"] |= dict.fromkeys(("proj_down", "proj_up", "smooth", "bias"), "float16")
    assert Header.from_dict(every).to_dict() == every


@pytest.mark.parametrize(
    "dtypes",
    [
        {"qweight": "uint8"},
        {"w_scales": "uint8"},
        {"qweight": "uint8", "w_scales": "float16", "weight": "float16"},
        {"qweight": "uint8", "w_scales": "float64"},
        {"qweight": "uint8", "w_scales": "load"},
    ],
)
def test_a_header_of_no_linear_is_refused(dtypes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be the tensors of a linear"):
        Header.from_dict(header(**dtypes))


def test_a_header_s_shapes_are_those_of_the_packed_linear() -> None:
    data = header(qweight="uint8", w_scales="uint8", row_scales="float32", bias="float16")
    data["spec"] |= {"rank": 0}
    found = Header.from_dict(data)
    packed = found.packed(repack.get("mma_s8"))
    assert {name: (tuple(t.shape), t.dtype) for name, t in packed.items()} == {
        "qweight": ((1, 1, 4, 32, 16), torch.uint8),
        "w_scales": ((1, 1, 4, 8, 2), torch.uint8),
        "row_scales": ((64,), torch.float32),
        "bias": ((64,), torch.float16),
    }
