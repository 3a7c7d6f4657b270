"""What a cache file's header says of each packed linear, and the shapes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from omniw4.errors import LayoutError
from omniw4.repack.layouts import Layout
from omniw4.repack.operands import check_linear
from omniw4.tensors import LinearSpec, QuantizedLinear

_REQUIRED = {"qweight", "w_scales"}
_OPTIONAL = {"row_scales", "proj_down", "proj_up", "smooth", "bias"}
_DTYPES = {"uint8", "float16", "bfloat16", "float32"}


@dataclass(frozen=True)
class Header:
    """What the shapes of a packed linear follow from."""

    spec: LinearSpec
    out_features: int
    in_features: int
    dtypes: dict[str, str]  # of the canonical tensors that are present

    @classmethod
    def of(cls, path: str, linear: QuantizedLinear) -> Header:
        """Raises LayoutError naming ``path`` when the linear's tensors do not fit together."""
        try:
            check_linear(linear)
        except LayoutError as e:
            raise LayoutError(f"{path}: {e.message}", hint=e.hint) from e
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in linear.tensors().items()}
        return cls(linear.spec, linear.out_features, linear.in_features, dtypes)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Header:
        """Inverse of :meth:`to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        dtypes = dict(data["dtypes"])
        if not _REQUIRED <= set(dtypes) <= _REQUIRED | _OPTIONAL or not set(dtypes.values()) <= _DTYPES:
            raise ValueError(f"{dtypes} cannot be the tensors of a linear")
        return cls(LinearSpec(**data["spec"]), int(data["out_features"]), int(data["in_features"]), dtypes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_dict(),
            "out_features": self.out_features,
            "in_features": self.in_features,
            "dtypes": self.dtypes,
        }

    def packed(self, layout: Layout) -> dict[str, torch.Tensor]:
        """The packed tensors without their data."""
        n, k, rank = self.out_features, self.in_features, self.spec.rank
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (n, k // 2),
            "w_scales": (n, k // self.spec.group_size),
            "row_scales": (n,),
            "proj_down": (k, rank),
            "proj_up": (n, rank),
            "smooth": (k,),
            "bias": (n,),
        }
        tensors = {
            name: torch.empty(shapes[name], dtype=getattr(torch, dtype), device="meta")
            for name, dtype in self.dtypes.items()
        }
        return layout.pack(QuantizedLinear(self.spec, **tensors))
