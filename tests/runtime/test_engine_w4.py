"""The quantized back ends on a CPU: the fused engine is the same model as its linears one by one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import backbone, packed, padded_forward

from omnivoice_fixture import build as build_omnivoice
from omniw4 import int4
from omniw4 import model as sources
from omniw4.checkpoint import Checkpoint
from omniw4.errors import ModelError, UsageError
from omniw4.runtime import Qwen3Engine, accelerate, fuse
from omniw4.runtime.backends import w4
from omniw4.runtime.backends.w4 import PackedProjection, W4Backend
from omniw4.runtime.qwen3 import DenseLinear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec, QuantizedLinear
from problems import assert_same, make_input, make_linear, relative_error
from tiny_models import quantize_blocks, write_checkpoint

LENGTHS = (13, 1, 7)
CPU = torch.device("cpu")


def swapped(model: torch.nn.Module, linears: Mapping[str, QuantizedLinear]) -> torch.nn.Module:
    other = copy.deepcopy(model)
    swap(other, linears)
    return other


def integer_scales(linear: QuantizedLinear) -> QuantizedLinear:
    """The same weight, its group scales rounded to small integers times a scale of the row."""
    weight = int4.dequantize(int4.unpack_nibbles(linear.qweight), linear.w_scales)
    rows = linear.w_scales.float().amax(1) / 16
    small = (linear.w_scales.float() / rows[:, None]).round().clamp(1, 16)
    codes = int4.split_groups(weight) / (rows[:, None] * small)[..., None]
    return replace(
        linear,
        spec=replace(linear.spec, scale_type="integer"),
        qweight=int4.pack_nibbles(codes.round().clamp(-8, 7).to(torch.int8).flatten(1)),
        w_scales=small.to(torch.uint8),
        row_scales=rows,
    )


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("act_bits", [4, 8, 16])
def test_is_the_model_with_swapped_linears(act_bits: int, smooth: bool, scale_type: str) -> None:
    model = backbone(attention_bias=True)
    linears = quantize_blocks(model, LinearSpec(act_bits=act_bits, smooth=smooth, rank=4))
    if scale_type == "integer":
        linears = {path: integer_scales(linear) for path, linear in linears.items()}
    quantized = swapped(model, linears)
    hidden, positions, cu_seqlens = packed(LENGTHS)
    wanted = padded_forward(quantized, hidden, LENGTHS, causal=False)
    found = Qwen3Engine.from_model(quantized, backend="w4a4", buckets=(32,))(hidden, positions, cu_seqlens)
    reference = Qwen3Engine.from_model(quantized, backend="reference", buckets=())(hidden, positions, cu_seqlens)
    assert relative_error(reference, wanted) < 1e-5
    # a code on the edge between two may fall to the other side, by the last bit of a sum
    assert relative_error(found, wanted) < 1e-2


def test_w4a8_is_the_same_weights_with_int8_activations() -> None:
    model = backbone()
    four = quantize_blocks(model, LinearSpec(act_clip=0.95))
    eight = {path: replace(q, spec=replace(q.spec, act_bits=8, act_clip=1.0)) for path, q in four.items()}
    inputs = packed(LENGTHS)
    found = Qwen3Engine.from_model(swapped(model, four), backend="w4a8", buckets=())(*inputs)
    wanted = Qwen3Engine.from_model(swapped(model, eight), backend="w4a4", buckets=())(*inputs)
    assert_same(found, wanted, "w4a8")
    assert relative_error(found, Qwen3Engine.from_model(swapped(model, four), backend="w4a4", buckets=())(*inputs)) > 0


@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_heads_in_the_product_or_after_it(scale_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of tokens, with the same bits."""
    model = backbone()
    linears = quantize_blocks(model, LinearSpec(rank=4))
    if scale_type == "integer":
        linears = {path: integer_scales(linear) for path, linear in linears.items()}
    engine = Qwen3Engine.from_model(swapped(model, linears), backend="w4a4", buckets=())
    inputs, tokens, rotations = packed(LENGTHS), sum(LENGTHS), []
    rotate = w4.LayerNorms.rotate
    monkeypatch.setattr(w4.LayerNorms, "rotate", lambda *args: (rotations.append(args), rotate(*args)))
    found = []
    for most in (tokens, tokens - 1):
        monkeypatch.setattr(w4, "HEADS_IN_PRODUCT", most)
        found.append(engine(*inputs))
        assert len(rotations) == (0 if most == tokens else model.config.num_hidden_layers)
    assert_same(found[0], found[1], "hidden states")


@pytest.mark.parametrize("end", ["q_proj", "gate_proj", "o_proj", "down_proj"])
def test_what_cannot_be_fused_runs_one_by_one(end: str, caplog: pytest.LogCaptureFixture) -> None:
    model = backbone(attention_bias=True)
    inputs = packed(LENGTHS)
    for spec in (LinearSpec(act_bits=8), None):  # another spec; left as it was
        linears = quantize_blocks(model, LinearSpec(), {} if spec is None else {end: spec})
        linears = {path: q for path, q in linears.items() if spec is not None or not path.endswith(end)}
        quantized = swapped(model, linears)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = Qwen3Engine.from_model(quantized, backend="w4a4", buckets=())(*inputs)
        wanted = padded_forward(quantized, inputs[0], LENGTHS, causal=False)
        assert relative_error(found, wanted) < 1e-2
        said = [r.getMessage() for r in caplog.records if "are not fused" in r.getMessage()]
        if end in ("q_proj", "gate_proj"):
            why = "quantized by different specs" if spec else "some of them are not quantized"
            assert len(said) == 1
            assert said[0].startswith("layers.0: ")
            assert said[0].endswith(why)
        else:
            assert said == []


def test_from_a_checkpoint_alone_or_over_a_model(tmp_path: Path) -> None:
    model = backbone(attention_bias=True)
    write_checkpoint(model, tmp_path, LinearSpec())
    folder = tmp_path / "checkpoint"
    inputs = packed(LENGTHS)
    over = Qwen3Engine.from_model(model, folder, backend="w4a4", buckets=())
    alone = Qwen3Engine.from_checkpoint(folder, device="cpu", dtype=torch.float32, buckets=())
    assert_same(alone(*inputs), over(*inputs), "from the checkpoint alone")
    again = Qwen3Engine.from_model(model.model, Checkpoint.open(folder), backend="reference", buckets=())  # type: ignore
    assert relative_error(again(*inputs), over(*inputs)) < 1e-2
    with pytest.raises(ModelError, match=r"q_proj: the checkpoint's linear is \[128, 128\], the model's is"):
        Qwen3Engine.from_model(backbone(head_dim=64), folder, backend="w4a4")


def test_a_checkpoint_of_other_depth(tmp_path: Path) -> None:
    """Fewer blocks would leave the last ones of the model unquantized, more would be dropped."""
    write_checkpoint(backbone(num_hidden_layers=2), tmp_path, LinearSpec())
    for layers in (1, 3):
        model = backbone(num_hidden_layers=layers)
        with pytest.raises(ModelError, match=f"'checkpoint' has 2 layers, the model has {layers}"):
            Qwen3Engine.from_model(model, tmp_path / "checkpoint", backend="w4a4", buckets=())
        with pytest.raises(ModelError, match="has 2 layers"):
            accelerate(model, tmp_path / "checkpoint", backend="w4a4", buckets=())


def test_from_a_checkpoint_of_an_omnivoice(tmp_path: Path) -> None:
    source = build_omnivoice(tmp_path / "model")
    write_checkpoint(source, tmp_path, LinearSpec())
    inputs = packed(LENGTHS)
    alone = Qwen3Engine.from_checkpoint(tmp_path / "checkpoint", device="cpu", dtype=torch.float32, buckets=())
    loaded = sources.load(source).model
    over = Qwen3Engine.from_model(loaded, tmp_path / "checkpoint", backend="w4a4", buckets=())
    assert_same(alone(*inputs), over(*inputs), "the backbone under llm")


def test_packed_weights_take_a_quarter_of_fp16() -> None:
    model = backbone()
    linears = quantize_blocks(model, LinearSpec(rank=0))
    engine = Qwen3Engine.from_model(swapped(model, linears), backend="w4a4", buckets=())
    dense = sum(2 * q.in_features * q.out_features for q in linears.values())
    assert engine.memory().weights == sum(
        t.numel() * t.element_size() for q in linears.values() for t in q.tensors().values()
    )
    assert engine.memory().weights < 0.27 * dense


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("scale_type", ["float16", "integer"])
def test_stacked_rows_are_the_rows_of_the_parts(scale_type: str, interleave: bool) -> None:
    parts = [make_linear(96, 128, rank, bias=rank != 3, seed=rank) for rank in (3, 0, 5)]
    if scale_type == "integer":
        parts = [integer_scales(replace(p, w_scales=p.w_scales.clamp(min=0.002))) for p in parts]
    assert fuse.why_not(parts) == ""
    stacked = fuse.stack_rows(parts, interleave=interleave)
    assert (stacked.spec.rank, stacked.out_features) == (8, 288)
    backend = W4Backend("w4a4", CPU, torch.float32)
    x = make_input(9, 128, torch.float32)
    found = backend.projection(stacked)(x)
    for index, part in enumerate(parts):
        rows = found[:, index::3] if interleave else found[:, 96 * index : 96 * (index + 1)]
        wanted = backend.projection(part)(x)
        assert relative_error(rows, wanted) < 1e-6
        exact = replace(part, proj_down=None, proj_up=None, bias=None)
        plain = backend.projection(fuse.stack_rows([replace(exact)] * 2, interleave=interleave))(x)
        assert_same(
            plain[:, ::2] if interleave else plain[:, :96], backend.projection(exact)(x), "without a low-rank branch"
        )


@pytest.mark.parametrize("rank", [5, 16])
def test_segments_are_the_parts(rank: int) -> None:
    parts = [integer_scales(make_linear(64 * n, 128, rank, seed=n)) for n in (2, 1, 1)]
    parts[2] = replace(parts[2], bias=None)
    assert fuse.segments(parts) == (128, 192)
    stacked = fuse.stack_segments(parts)
    assert (stacked.spec.rank, stacked.out_features) == (16, 256)
    assert stacked.proj_down is not None
    assert stacked.proj_up is not None
    assert (stacked.proj_down.shape, stacked.proj_up.shape) == ((128, 48), (256, 16))
    backend = W4Backend("w4a4", CPU, torch.float32)
    (projection,) = backend.fuse("layer", ("q", "k", "v"), parts, interleave=False)
    assert isinstance(projection, PackedProjection)
    assert projection.segment_ends == (128, 192)
    x = make_input(9, 128, torch.float32)
    wanted = torch.cat([backend.projection(part)(x) for part in parts], dim=1)
    assert relative_error(projection(x), wanted) < 1e-6
    assert fuse.segments([parts[0], make_linear(64, 128, 0)]) == ()
    assert fuse.segments([make_linear(64, 128, 0)] * 2) == ()
    assert fuse.segments(parts[:1]) == ()


def test_why_linears_cannot_be_stacked() -> None:
    first = make_linear(64, 128, smooth=True)
    assert "different specs" in fuse.why_not([first, make_linear(64, 128, smooth=True, act_bits=8)])
    assert "different smoothing vectors" in fuse.why_not([first, make_linear(64, 128, smooth=True, seed=1)])
    assert "128 and 192 features" in fuse.why_not([first, make_linear(64, 192, smooth=True)])
    assert "rank 384 together" in fuse.why_not([make_linear(64, 128, 128)] * 3)
    assert "different dtypes" in fuse.why_not([make_linear(64, 128), make_linear(64, 128, dtype=torch.bfloat16)])
    assert fuse.why_not([make_linear(64, 128, 0), make_linear(64, 128, dtype=torch.bfloat16)]) == ""


def test_a_layout_nothing_is_compiled_for_and_float32_on_a_gpu() -> None:
    with pytest.raises(UsageError, match="float32 are not for a GPU"):
        W4Backend("w4a4", torch.device("cuda", 0), torch.float32)
    dense = DenseLinear(torch.randn(64, 128), None)
    assert W4Backend("w4a4", CPU, torch.float16).projection(dense)(torch.zeros(2, 128).half()).dtype == torch.float16
