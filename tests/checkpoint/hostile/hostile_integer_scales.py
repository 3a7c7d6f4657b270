"""Linears with integer group scales that are none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from hostile_case import Case
from raw_checkpoint import PLAIN, RawCheckpoint, Tensor, zeros

from omniw4 import errors

SCALES, ROWS = f"{PLAIN}.w_scales", f"{PLAIN}.row_scales"


def make_integer(raw: RawCheckpoint) -> None:
    """Give the plain linear, [8, 128], integer scales: m = 1 … 16 and rows of 0.5."""
    raw.quantization["modules"][PLAIN]["scale_type"] = "integer"
    raw.tensors[SCALES] = ("U8", [8, 2], bytes(range(1, 17)))
    raw.tensors[ROWS] = ("F32", [8], struct.pack("<8f", *[0.5] * 8))


def integer_scales() -> Iterator[Case]:
    def wrong(name: str, error: type, mentions: str, tensors: dict[str, Tensor], stage: Any = "open") -> Case:
        return Case(
            f"integer scales: {name}", error, (mentions,), before=_then(lambda raw: raw.tensors.update(tensors)),
            stage=stage,
        )  # fmt: skip

    yield wrong("w_scales F16", errors.TensorDtypeError, SCALES, {SCALES: zeros("F16", 8, 2)})
    yield wrong("w_scales I8", errors.TensorDtypeError, SCALES, {SCALES: zeros("I8", 8, 2)})
    yield wrong("w_scales of another shape", errors.TensorShapeError, SCALES, {SCALES: zeros("U8", 2, 8)})
    for dtype in ("F16", "F64"):
        yield wrong(f"row_scales {dtype}", errors.TensorDtypeError, ROWS, {ROWS: zeros(dtype, 8)})
    for shape in ((8, 1), (2,), ()):
        yield wrong(f"row_scales {shape}", errors.TensorShapeError, ROWS, {ROWS: zeros("F32", *shape)})
    yield wrong(
        "m of 17", errors.ScaleValueError, f"{SCALES}'[7, 1] is 17", {SCALES: ("U8", [8, 2], bytes([16] * 15 + [17]))},
        "read",
    )  # fmt: skip
    for title, value, error in (
        ("NaN", float("nan"), errors.NonFiniteTensorError),
        ("inf", float("inf"), errors.NonFiniteTensorError),
        ("negative", -0.5, errors.ScaleValueError),
    ):
        rows = struct.pack("<8f", 0.5, value, *[0.5] * 6)
        yield wrong(f"row scale {title}", error, f"{ROWS}'[1]", {ROWS: ("F32", [8], rows)}, "read")
    yield Case(
        "integer scales: row_scales neither there nor listed",
        errors.MissingTensorError,
        (ROWS,),
        before=_then(lambda raw: raw.tensors.pop(ROWS)),
    )
    yield Case(
        "float16 scales: row_scales where none may be",
        errors.UnexpectedTensorError,
        (ROWS, "scale_type float16"),
        before=_then(lambda raw: raw.quantization["modules"][PLAIN].pop("scale_type")),
    )
    yield Case(
        "float16 scales: w_scales U8",
        errors.TensorDtypeError,
        (SCALES, "U8"),
        before=lambda raw: raw.tensors.update({SCALES: zeros("U8", 8, 2)}),
    )


def _then(change: Callable[[RawCheckpoint], Any]) -> Callable[[RawCheckpoint], None]:
    def both(raw: RawCheckpoint) -> None:
        make_integer(raw)
        change(raw)

    return both
