"""``W4A4Linear``: a drop-in for ``nn.Linear`` that holds one quantized linear and runs it through the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4 import ops, repack
from omniw4.checkpoint import Checkpoint
from omniw4.errors import LayoutError, ModelError, OpError
from omniw4.tensors import QuantizedLinear

_Optional = torch.Tensor | None
_Operands = tuple[torch.Tensor, torch.Tensor, _Optional, _Optional, _Optional, _Optional]
_LARGE = ("qweight", "w_scales")  # what is held once: as it is on disk, or packed
_NAMES = ("qweight", "w_scales", "row_scales", "proj_down", "proj_up", "smooth", "bias")


class W4A4Linear(nn.Module):
    """``y = x·Wᵀ + bias`` with the weight of a :class:`~omniw4.tensors.QuantizedLinear`.

    The tensors are buffers under their names on disk, so ``state_dict`` keys are the checkpoint's. They keep the
    dtypes they have on disk: ``half()``, ``float()`` and ``to(dtype)`` move a model without changing its integers,
    scales or low-rank branch. The result has the dtype of the input.

    On a GPU with compiled kernels the weights are repacked once, by :meth:`prepare`; everywhere else the reference
    runs. ``layout`` says which: ``"canonical"`` is the reference. Codes and scales are in memory once: packed, they are
    None under their own names, and :meth:`quantized` and ``state_dict`` unpack them.

    Inference only: no gradient flows to the input, and a backward pass raises.
    """

    qweight: torch.Tensor | None
    w_scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    proj_down: torch.Tensor | None
    proj_up: torch.Tensor | None
    smooth: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self.spec = linear.spec
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.layout = ops.CANONICAL
        tensors = linear.tensors()
        for name in _NAMES:
            self.register_buffer(name, tensors.get(name))
        self._packed_names: tuple[str, ...] = ()
        self.requires_grad_(False)

    @classmethod
    def from_quantized(cls, linear: QuantizedLinear) -> W4A4Linear:
        """A module over the tensors of ``linear`` (shared, not copied)."""
        return cls(linear)

    @classmethod
    def from_checkpoint(cls, folder: str | Path, path: str, device: torch.device | str = "cpu") -> W4A4Linear:
        """One linear of a checkpoint, ready to run on ``device``.

        Raises:
            CheckpointError: the checkpoint breaks a rule of its format.
            ModelError: it has no quantized linear of that path.
        """
        checkpoint = Checkpoint.open(folder)
        if path not in checkpoint.specs:
            raise ModelError(f"checkpoint {checkpoint.folder.name!r} has no quantized linear {path!r}")
        module = cls(checkpoint.linear(path, device))
        module.prepare()
        return module

    @property
    def device(self) -> torch.device:
        return self._codes().device

    def quantized(self) -> QuantizedLinear:
        """The tensors as they are on disk: shared with the module, but for codes and scales that are packed."""
        tensors = {name: getattr(self, name) for name in _NAMES}
        if self.layout != ops.CANONICAL:
            tensors.update(zip(_LARGE, self._unpacked(), strict=True))
        return QuantizedLinear(self.spec, **tensors)

    def prepare(
        self,
        layout: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        packed: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Repack the weights for a kernel family; the canonical codes and scales are given up.

        Args:
            layout: a layout of :mod:`omniw4.repack`, "canonical" to go back to the reference, or None for the best
                family compiled for the device the module is on.
            dtype: of the activations to come; the low-rank branch is converted to it once instead of at each call.
            packed: what the layout's ``pack`` gives for this linear, where it is known already (the repack cache).

        Raises:
            LayoutError: the layout is unknown or does not fit the linear.
        """
        device = self.device
        if layout is None:
            layout = ops.kernel_layout(device, self.spec.act_bits, self.spec.scale_type)
        self._restore()
        if layout == ops.CANONICAL:
            return
        family = repack.get(layout)
        if reason := family.unsupported(self.spec):
            raise LayoutError(f"layout {layout!r} cannot run this linear: {reason}")
        tensors = dict(family.pack(self.quantized()) if packed is None else packed)
        if (smooth := tensors.pop("smooth", None)) is not None:
            tensors["inv_smooth"] = smooth.float().reciprocal()
        tensors.pop("bias", None)  # the op takes it as it is
        for name, tensor in tensors.items():
            kept = dtype if dtype is not None and name in ("proj_down", "proj_up") else tensor.dtype
            self.register_buffer(f"packed_{name}", tensor.to(device, kept), persistent=False)
        self._packed_names = tuple(f"packed_{name}" for name in tensors)
        self.layout = layout
        for name in _LARGE:
            setattr(self, name, None)

    def _codes(self) -> torch.Tensor:
        """The codes, in whichever layout they are."""
        codes = self.get_buffer("packed_qweight") if self.layout != ops.CANONICAL else self.qweight
        assert codes is not None
        return codes

    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical codes and group scales from the packed ones, bit for bit."""
        names = [name for name in ("qweight", "w_scales", "row_scales") if f"packed_{name}" in self._packed_names]
        packed = {name: self.get_buffer(f"packed_{name}") for name in names}
        spec = replace(self.spec, rank=0, smooth=False)  # the rest is there as it was
        linear = repack.get(self.layout).unpack(packed, spec, self.out_features, self.in_features)
        return linear.qweight, linear.w_scales

    def _restore(self) -> None:
        """Back to the canonical layout."""
        if self.layout == ops.CANONICAL:
            return
        for name, tensor in zip(_LARGE, self._unpacked(), strict=True):
            setattr(self, name, tensor)
        for name in self._packed_names:
            delattr(self, name)
        self.layout, self._packed_names = ops.CANONICAL, ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` float to ``[..., N]`` of the same dtype; any strides, any leading dimensions.

        Raises:
            OpError: the last dimension is not in_features, or the dtype is not a float the device's ops take.
        """
        if x.shape[-1] != self.in_features:
            raise OpError(f"W4A4Linear({self.in_features}, {self.out_features}) got an input of shape {list(x.shape)}")
        tokens = x.reshape(-1, self.in_features)
        qweight, w_scales, row_scales, proj_down, proj_up, inv_smooth = self._operands(x.dtype)
        qact, a_scales, lora_act, token_scales = ops.quantize_lora_down(
            tokens, proj_down, inv_smooth, None, None, self.spec.rotation, self.spec.act_bits, self.spec.act_clip,
            self.layout, self.spec.scale_type,
        )  # fmt: skip
        y = ops.gemm_lora_up(
            qact, a_scales, qweight, w_scales, lora_act if proj_up is not None else None, proj_up, self.bias, None,
            tokens.shape[0], self.out_features, self.spec.act_bits, "plain", x.dtype, self.layout,
            row_scales, token_scales,
        )  # fmt: skip
        return y.reshape(*x.shape[:-1], self.out_features)

    def _operands(self, dtype: torch.dtype) -> _Operands:
        """qweight, w_scales, row_scales, proj_down, proj_up and the reciprocal of smooth, in the layout that runs."""
        if self.layout == ops.CANONICAL:
            inv_smooth = None if self.smooth is None else self.smooth.float().reciprocal()
            assert self.qweight is not None
            assert self.w_scales is not None
            return self.qweight, self.w_scales, self.row_scales, self.proj_down, self.proj_up, inv_smooth
        packed: dict[str, torch.Tensor] = {name: getattr(self, name) for name in self._packed_names}
        low_rank = (packed.get(f"packed_{name}") for name in ("proj_down", "proj_up"))
        # kernels multiply the low-rank branch in the dtype of the activations; prepare(dtype=...) converts it once
        down, up = (tensor if tensor is None else tensor.to(dtype) for tensor in low_rank)
        rows, inv_smooth = packed.get("packed_row_scales"), packed.get("packed_inv_smooth")
        return packed["packed_qweight"], packed["packed_w_scales"], rows, down, up, inv_smooth

    def extra_repr(self) -> str:
        spec = self.spec
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"w{spec.weight_bits}a{spec.act_bits}, rank={spec.rank}, rotation={spec.rotation}, "
            f"scales={spec.scale_type}, layout={self.layout}"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != ops.CANONICAL:
            destination.update(zip((prefix + name for name in _LARGE), self._unpacked(), strict=True))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        layout = self.layout
        low_rank = getattr(self, "packed_proj_up", None)
        self._restore()
        super()._load_from_state_dict(*args, **kwargs)
        if layout != ops.CANONICAL:
            self.prepare(layout, dtype=None if low_rank is None else low_rank.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W4A4Linear:
        """Follow a model to another device, never to another dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        before = self.device
        super()._apply(move, recurse)
        if self.device != before and self.device.type != "meta":
            self.prepare()  # what is compiled there may be another family, or none
        return self
