"""What one quantized linear consists of, and what is known about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from omniw4 import int4
from omniw4.hadamard import hadamard64

Rotation = Literal["none", "hadamard64"]
ScaleType = Literal["float16", "integer"]


@dataclass(frozen=True)
class LinearSpec:
    """How one linear is quantized: the part of the recipe that a reader of the checkpoint must know.

    ``act_bits`` 4: INT4 per (token, group of 64). 8: INT8 per token. 16: activations stay as they are.
    ``scale_type`` is that of the weights' groups and of the groups of INT4 activations (:mod:`omniw4.int4`).
    """

    weight_bits: int = 4
    act_bits: int = 4
    group_size: int = int4.GROUP_SIZE
    rank: int = 16
    rotation: Rotation = "hadamard64"
    smooth: bool = False
    act_clip: float = 1.0
    scale_type: ScaleType = "float16"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class QuantizedLinear:
    """One quantized linear in the canonical layout (docs/checkpoint-format.md).

    ``y = deq(q(x'))·deq(qweight)ᵀ + (x'·proj_down)·proj_upᵀ + bias`` with ``x' = (x / smooth)·H64``.
    ``qweight``, ``w_scales`` and ``proj_down`` live in the transformed space of x'.
    """

    spec: LinearSpec
    qweight: torch.Tensor  # [N, K/2] uint8
    w_scales: torch.Tensor  # [N, K/64] float16; uint8 with integer scales
    proj_down: torch.Tensor | None = None  # [K, R] float16 or bfloat16; None when R = 0
    proj_up: torch.Tensor | None = None  # [N, R] same dtype
    smooth: torch.Tensor | None = None  # [K] same dtype
    bias: torch.Tensor | None = None  # [N] same dtype
    row_scales: torch.Tensor | None = None  # [N] float32 with integer scales, else None

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1] * 2

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by their names on disk."""
        names = ("qweight", "w_scales", "row_scales", "proj_down", "proj_up", "smooth", "bias")
        return {name: t for name in names if (t := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> QuantizedLinear:
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, **moved)

    def dequantize_codes(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``deq(qweight) [N, K]``: codes times scales, in the transformed space and without the low-rank branch."""
        codes = int4.unpack_nibbles(self.qweight)
        if self.row_scales is None:
            return int4.dequantize(codes, self.w_scales, dtype)
        return int4.dequantize_integer(codes, self.w_scales, self.row_scales[:, None], dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight ``[N, K]`` this linear stands for in the model's own space, low-rank branch included."""
        weight = self.dequantize_codes(dtype)
        if self.proj_down is not None and self.proj_up is not None:
            weight = weight + self.proj_up.to(dtype) @ self.proj_down.to(dtype).T
        if self.spec.rotation == "hadamard64":
            weight = hadamard64(weight).to(dtype)
        if self.smooth is not None:
            weight = weight / self.smooth.to(dtype)
        return weight

    def effective_bits(self) -> float:
        """Stored bits per weight: codes, scales, low-rank branch and smoothing vector; the bias is not counted."""
        stored = sum(t.numel() * t.element_size() for name, t in self.tensors().items() if name != "bias")
        return 8 * stored / (self.out_features * self.in_features)


@dataclass
class LinearStats:
    """Calibration statistics of one linear's input, in the model's own space (before smoothing and rotation).

    Means over all counted tokens (padding and excluded rows are not counted).
    """

    hessian: torch.Tensor  # [K, K] float32: mean of x xᵀ
    hessian_normalized: torch.Tensor  # [K, K] float32: mean of x xᵀ / mean(x²), every token weighing the same
    absmax: torch.Tensor  # [K] float32
    rms: torch.Tensor  # [K] float32
    tokens: int
    excluded: int = 0  # rows left out because they held NaN or inf


@dataclass
class LayerReport:
    """What quantizing one linear did; stored in the checkpoint and printed as a row of the table.

    Errors are relative output errors on the calibration statistics: ``‖X(W-Ŵ)ᵀ‖² / ‖XWᵀ‖²`` with weights
    quantized and activations not; without statistics, of the weights alone: ``‖W-Ŵ‖² / ‖W‖²``.
    """

    path: str
    out_features: int
    in_features: int
    method: str  # "gptq", "rtn", or "rtn-fallback" when the Hessian could not be factorised
    relative_error: float
    sqnr_db: float
    damp: float
    rank_energy: float  # share of the residual's energy (squared Frobenius norm) held by the low-rank branch
    rounds: list[float] = field(default_factory=list)  # error after each, before sweeps; under the recipe's own Hessian
    best_round: int = 0
    rtn_error: float = float("nan")  # relative_error of the data-free recipe on the same linear, for comparison
    seconds: float = 0.0
    smooth_strength: float | None = None  # what recipe.smooth.strength: search chose; None where it was not searched
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
