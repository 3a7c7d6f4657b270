"""A quantized linear whose low-rank branch and scales can be trained, its codes fixed.

The forward is the contract of the runtime with two straight-through estimators: the activation quantizer and the
rounding of parameters to the dtypes they have on disk pass gradients as if they were the identity (Bengio et al.,
arXiv 1308.3432). So what is trained is what is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omniw4 import int4
from omniw4.errors import ModelError
from omniw4.hadamard import WIDTH, hadamard64
from omniw4.tensors import QuantizedLinear

SCALE_RANGE = 0.5  # a scale stays within this share of where it began


class StudentLinear(nn.Module):
    """One linear of the original model and its quantized twin, of which :attr:`teaching` chooses one.

    Args:
        original: the linear it replaces; never trained.
        linear: what the quantizer made of it, in the original's device.
        train_scales: also train the scales: each weight group's, or with integer group scales each row's.

    Parameters are FP32: ``proj_down [K, R]`` and ``proj_up [N, R]`` as they are on disk, and ``scale_shift``, the
    relative change of the scales (``[N, K/64]`` or ``[N, 1]``).
    """

    codes: torch.Tensor  # [N, K] int8, times the integer group scales where there are such
    scales: torch.Tensor  # [N, K/64] or [N, 1] float32
    inv_smooth: torch.Tensor | None  # [K] float32
    rotation: torch.Tensor  # [64, 64] float32

    def __init__(self, original: nn.Linear, linear: QuantizedLinear, *, train_scales: bool = True) -> None:
        super().__init__()
        self.original = original
        self.teaching = False
        self._linear = linear
        self.spec = linear.spec
        outer = linear.row_scales[:, None] if linear.row_scales is not None else linear.w_scales
        codes = int4.unpack_nibbles(linear.qweight)
        if linear.row_scales is not None:
            codes = int4.widen(codes, linear.w_scales)
        device = original.weight.device
        self.register_buffer("codes", codes.to(device), persistent=False)
        self.register_buffer("scales", outer.float().to(device), persistent=False)
        self.register_buffer("inv_smooth", _reciprocal(linear.smooth, device), persistent=False)
        self.register_buffer("rotation", hadamard64(torch.eye(WIDTH)).to(device), persistent=False)
        self._device = device
        self._round = self._rounding()
        self.proj_down = _parameter(linear.proj_down, device)
        self.proj_up = _parameter(linear.proj_up, device)
        self.scale_shift = nn.Parameter(torch.zeros_like(self.scales)) if train_scales else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.teaching:
            return self.original(x)
        with torch.autocast(x.device.type, enabled=False):  # the quantizer sees FP32, as at run time
            y = x.float() if self.inv_smooth is None else x.float() * self.inv_smooth
            if self.spec.rotation == "hadamard64":
                y = (y.unflatten(-1, (-1, WIDTH)) @ self.rotation).flatten(-2)
            grid: torch.Tensor = y if self.spec.act_bits == 16 else _StraightThrough.apply(y, self._round)
        out = F.linear(grid, self.weight(), self.original.bias)
        if self.proj_down is not None and self.proj_up is not None:
            dtype = self._linear.proj_down.dtype  # type: ignore[union-attr]
            out = out + (y @ _rounded(self.proj_down, dtype)) @ _rounded(self.proj_up, dtype).T
        return out.to(x.dtype)

    def weight(self) -> torch.Tensor:
        """``[N, K]`` in the transformed space, without the low-rank branch; differentiable in the scales."""
        scales = self.trained_scales()
        groups = self.codes.float().unflatten(-1, (scales.shape[-1], -1))
        return (groups * scales[..., None]).flatten(-2)

    def trained_scales(self) -> torch.Tensor:
        """``[N, K/64]`` or ``[N, 1]`` FP32, on the grid of their dtype on disk."""
        if self.scale_shift is None:
            return self.scales
        scales = self.scales * (1 + self.scale_shift.clamp(-SCALE_RANGE, SCALE_RANGE))
        if self._linear.row_scales is not None:
            return scales
        kept = scales.clamp(int4.SCALE_MIN, int4.SCALE_MAX)
        return _rounded(torch.where(self.scales == 0, torch.zeros_like(kept), kept), torch.float16)

    @contextmanager
    def with_int8_activations(self) -> Iterator[None]:
        """As if the recipe said INT8 per token, over the whole range, for this linear."""
        before = self.spec
        self.spec = replace(before, act_bits=8, act_clip=1.0)
        self._round = self._rounding()
        try:
            yield
        finally:
            self.spec = before
            self._round = self._rounding()

    def _rounding(self) -> Callable[[torch.Tensor], torch.Tensor]:
        rounding = _activation_rounding(self.spec.act_bits, self.spec.scale_type, self._device.type == "cuda")
        clip = self.spec.act_clip
        return lambda y: rounding(y, clip)

    @torch.no_grad()
    def quantized(self) -> QuantizedLinear:
        """The linear as it is stored, on the CPU."""
        changed: dict[str, torch.Tensor] = {}
        for name in ("proj_down", "proj_up"):
            trained, stored = getattr(self, name), getattr(self._linear, name)
            if trained is not None and stored is not None:
                changed[name] = trained.detach().to(stored.dtype).cpu()
        if self.scale_shift is not None and self._linear.row_scales is not None:
            changed["row_scales"] = self.trained_scales()[:, 0].cpu().clone()
        elif self.scale_shift is not None:
            changed["w_scales"] = self.trained_scales().to(torch.float16).cpu()
        return replace(self._linear.to("cpu"), **changed)  # type: ignore[arg-type]


class Student:
    """A model whose linears are :class:`StudentLinear`; use as a context manager, which puts the originals back.

    Args:
        model: any module; its parameters are frozen while the student exists.
        linears: path to the quantized linear that replaces the one there.

    Raises:
        ModelError: the model has no linear of a path.
    """

    def __init__(self, model: nn.Module, linears: Mapping[str, QuantizedLinear], *, train_scales: bool = True) -> None:
        self.model = model
        self._frozen = [p for p in model.parameters() if p.requires_grad]
        self.modules: dict[str, StudentLinear] = {}
        for path, linear in linears.items():
            try:
                original = model.get_submodule(path)
            except AttributeError:
                original = None
            if not isinstance(original, nn.Linear):
                raise ModelError(f"the model has no linear {path!r} to distil")
            self.modules[path] = StudentLinear(original, linear, train_scales=train_scales)

    def __enter__(self) -> Student:
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        for path, module in self.modules.items():
            self.model.set_submodule(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        for path, module in self.modules.items():
            self.model.set_submodule(path, module.original)
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    @contextmanager
    def teacher(self) -> Iterator[nn.Module]:
        """The original model: every linear answers as it did before."""
        self._teach(True)
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self._teach(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything that is trained, by ``<path>.<name>``, in a fixed order."""
        names = ("proj_down", "proj_up", "scale_shift")
        found = ((f"{path}.{n}", getattr(m, n)) for path, m in sorted(self.modules.items()) for n in names)
        return {name: parameter for name, parameter in found if parameter is not None}

    def _teach(self, on: bool) -> None:
        for module in self.modules.values():
            module.teaching = on


class _StraightThrough(torch.autograd.Function):
    """``rounding(x)`` whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _StraightThrough.apply(x, lambda t: t.to(dtype).float())


def _round_int8(y: torch.Tensor, clip: float) -> torch.Tensor:
    return int4.dequantize(*int4.quantize_tokens(y, clip))


def _round_int4(y: torch.Tensor, clip: float) -> torch.Tensor:
    return int4.dequantize(*int4.quantize_groups(y, clip))


def _round_int4_integer(y: torch.Tensor, clip: float) -> torch.Tensor:
    return int4.dequantize_integer(*int4.quantize_groups_integer(y, clip))


@functools.cache
def _activation_rounding(
    act_bits: int, scale_type: str, compiled: bool
) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """x' to the grid of the activation quantizer, as the runtime's op rounds it; ``[..., K]`` to ``[..., K]``.

    Compiled, its twenty operations are one or two kernels: a step on a GPU is bound by the launches.
    """
    rounding = _round_int8 if act_bits == 8 else _round_int4_integer if scale_type == "integer" else _round_int4
    if not compiled:
        return rounding
    # without this option the compiler leaves out the rounding of scales to FP16
    return torch.compile(rounding, dynamic=True, options={"emulate_precision_casts": True})


def _parameter(tensor: torch.Tensor | None, device: torch.device) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().float().to(device).clone())


def _reciprocal(smooth: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if smooth is None else (1 / smooth.float()).to(device)
