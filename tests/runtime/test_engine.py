"""The Qwen3 engine on a CPU: it is transformers' forward, whatever is packed together and however it is padded."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import HIDDEN, backbone, packed, padded_forward

import omniw4
from omniw4.errors import ModelError, OpError, UsageError
from omniw4.runtime import Qwen3Engine
from omniw4.runtime.qwen3 import Qwen3Config
from omniw4.tensors import LinearSpec
from problems import assert_same, relative_error
from tiny_models import llama, write_checkpoint

LENGTHS = (13, 1, 7, 22)
BACKBONES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "heads of 64": {"head_dim": 64},
    "heads of 128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "as many key heads as query heads": {"num_key_value_heads": 4},
    "attention bias": {"attention_bias": True},
    "scaled rotary embedding": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        }
    },
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def engine(model: torch.nn.Module, **options: Any) -> Qwen3Engine:
    return Qwen3Engine.from_model(model, **{"backend": "reference", "buckets": (), **options})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_is_transformers_forward(name: str, causal: bool) -> None:
    model = backbone(**BACKBONES[name])
    hidden, positions, cu_seqlens = packed(LENGTHS)
    before = hidden.clone()
    found = engine(model, causal=causal)(hidden, positions, cu_seqlens)
    wanted = padded_forward(model, hidden, LENGTHS, causal=causal)
    assert relative_error(found, wanted) < 1e-5
    assert_same(hidden, before, "the input")


@pytest.mark.parametrize("backend", ["fp16", "bf16", "fp8"])
def test_dense_back_ends(backend: str) -> None:
    """As exact as transformers is in the same dtype: against FP32, at most twice its error (FP8: its own grid)."""
    dtype = torch.float16 if backend == "fp16" else torch.bfloat16
    model = backbone(attention_bias=True)
    hidden, positions, cu_seqlens = packed(LENGTHS, dtype=dtype)
    exact = padded_forward(model, hidden.float(), LENGTHS, causal=False)
    plain = padded_forward(model.to(dtype), hidden, LENGTHS, causal=False)
    made = engine(model, backend=backend)
    assert (made.backend, made.dtype, made.attention) == (backend, dtype, "sdpa-loop")
    error = relative_error(made(hidden, positions, cu_seqlens), exact)
    assert error < (0.15 if backend == "fp8" else 2 * relative_error(plain, exact))


@pytest.mark.parametrize("backend", ["reference", "w4a4", "w4a8"])
def test_neither_padding_nor_company_nor_bucket_changes_a_bit(backend: str, tmp_path: Path) -> None:
    model, checkpoint = backbone(attention_bias=True), None
    if backend != "reference":
        write_checkpoint(model, tmp_path, LinearSpec())
        checkpoint = tmp_path / "checkpoint"
    exact = Qwen3Engine.from_model(model, checkpoint, backend=backend, buckets=())
    padded = Qwen3Engine.from_model(model, checkpoint, backend=backend, buckets=(32, 43, 64), max_sequences=5)
    hidden, positions, cu_seqlens = packed(LENGTHS)
    together = exact(hidden, positions, cu_seqlens)
    assert_same(padded(hidden, positions, cu_seqlens), together, "a bucket it fills")
    for index, (first, last) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        alone = (hidden[first:last], positions[first:last], torch.tensor([0, last - first], dtype=torch.int32))
        assert_same(exact(*alone), together[first:last], f"sequence {index} alone")
        assert_same(padded(*alone), together[first:last], f"sequence {index} alone and padded")
    # what an earlier call left in the static buffers is gone
    poison = hidden.clone()
    poison[20:] = float("nan")
    padded(poison, positions, cu_seqlens)
    first = (hidden[:13], positions[:13], cu_seqlens[:2])
    assert_same(padded(*first), together[:13], "after a call of NaN")


def test_a_call_beyond_the_buckets_runs_with_one_warning() -> None:
    model = backbone()
    made, exact = engine(model, buckets=(16,), max_sequences=2), engine(model)
    inputs = packed((9, 9))
    with pytest.warns(UserWarning, match="18 tokens in 2 sequences is beyond the engine's largest bucket, 16 tokens"):
        assert_same(made(*inputs), exact(*inputs), "a longer input")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crowded = packed((2, 2, 2))
        assert_same(made(*crowded), exact(*crowded), "more sequences")


def test_results_are_the_callers() -> None:
    made = engine(backbone(), buckets=(16,))
    first = made(*packed((5,), seed=1))
    kept = first.clone()
    made(*packed((9,), seed=2))
    assert_same(first, kept, "the first result")
    empty = made(torch.zeros(0, HIDDEN), torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))
    assert empty.shape == (0, HIDDEN)


def test_threads_take_turns() -> None:
    """Static buffers are shared: what two threads call at once must not mix."""
    made = engine(backbone(), buckets=(16,))
    calls = [packed((n,), seed=n) for n in (3, 5, 9, 14)]
    wanted = [made(*call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for found, expected in zip(pool.map(lambda call: made(*call), calls), wanted, strict=True):
                assert_same(found, expected, "a call among others")


def test_weights_are_in_memory_once() -> None:
    model = backbone(attention_bias=True).half()
    before = model.model.layers[0].self_attn.k_proj.weight.clone()  # type: ignore[union-attr, index]
    made = engine(model, backend="fp16")
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    stacked = made.backbone.layers[0].tensors()[0]
    assert attention.k_proj.weight.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()
    assert_same(attention.k_proj.weight, before, "the model's weight")
    hidden, _, _ = packed((11,), dtype=torch.float16)
    assert padded_forward(model, hidden, (11,), causal=True).isfinite().all()
    linears = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]  # type: ignore[union-attr]
    assert made.memory().weights >= sum(2 * linear.weight.numel() for linear in linears)
    assert made.memory().buffers == 0
    assert engine(model, buckets=(16,)).memory().buffers > 0


def test_release_gives_the_models_linears_back() -> None:
    model = backbone()
    inputs = packed(LENGTHS)
    wanted = engine(model)(*inputs)
    made = engine(model, release=True)
    assert_same(made(*inputs), wanted, "after release")
    assert model.model.layers[1].mlp.up_proj.weight.is_meta  # type: ignore[union-attr, index]
    with pytest.raises(ModelError, match="has no weight any more"):
        engine(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(20, 64)}, r"hidden has shape \[20, 64\], wanted \[20, 128\]"),
        ({"hidden": torch.zeros(2, 10, 128)}, r"hidden is \[2, 10, 128\]"),
        ({"hidden": torch.zeros(20, 128).half()}, "hidden has dtype torch.float16, wanted torch.float32"),
        ({"positions": torch.zeros(19, dtype=torch.int64)}, r"positions has shape \[19\], wanted \[20\]"),
        ({"positions": torch.zeros(20, dtype=torch.int32)}, "positions has dtype torch.int32"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "cu_seqlens has dtype torch.int64"),
        ({"cu_seqlens": torch.tensor([0], dtype=torch.int32)}, "at least one sequence"),
        ({"cu_seqlens": torch.tensor([0, 19], dtype=torch.int32)}, r"cu_seqlens is \[0, 19\], wanted .* from 0 to 20"),
        ({"cu_seqlens": torch.tensor([0, 12, 9, 20], dtype=torch.int32)}, r"cu_seqlens is \[0, 12, 9, 20\]"),
        ({"cu_seqlens": torch.tensor([1, 20], dtype=torch.int32)}, r"cu_seqlens is \[1, 20\]"),
    ],
)
def test_inputs_refused_by_name(change: dict[str, torch.Tensor], message: str) -> None:
    made = engine(backbone(num_hidden_layers=1))
    inputs = dict(zip(("hidden", "positions", "cu_seqlens"), packed((20,)), strict=True)) | change
    with pytest.raises(OpError, match=f"engine: .*{message}"):
        made(**inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "int3"}, "no back end 'int3'"),
        ({"attention_provider": "magic"}, "no attention provider 'magic'"),
        ({"buckets": (64, 32)}, r"buckets are \[64, 32\]"),
        ({"buckets": (0, 32)}, r"buckets are \[0, 32\]"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"layout": "mma_s4"}, "back end 'reference' has no layouts"),
        ({"backend": "fp8"}, "back end 'fp8' has hidden states of 16 bits, the model's are torch.float32"),
    ],
)
def test_options_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine(backbone(num_hidden_layers=1), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding windows"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding is 'dynamic'",
        ),
    ],
)
def test_models_the_forward_does_not_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        engine(backbone(num_hidden_layers=1, **changes))


def test_what_is_no_qwen3() -> None:
    with pytest.raises(ModelError, match="a Linear has no Qwen3 backbone"):
        engine(torch.nn.Linear(4, 4))
    with pytest.raises(ModelError, match="a object has no hidden_size, num_hidden_layers"):
        Qwen3Config.from_hf(object())
    with pytest.raises(ModelError, match="back end 'w4a4' needs quantized linears, the model has none"):
        engine(backbone(num_hidden_layers=1), backend="w4a4")
    model = backbone(num_hidden_layers=1)
    model.model.layers[0].self_attn.q_proj = torch.nn.Identity()  # type: ignore[union-attr, index]
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj is a Identity, wanted an nn.Linear"):
        engine(model)
    assert engine(llama(num_hidden_layers=1)).config.num_layers == 1  # the same forward, without q/k norms


def test_a_quantized_model_and_a_dense_back_end(tmp_path: Path) -> None:
    write_checkpoint(backbone(), tmp_path, LinearSpec())
    with pytest.raises(ModelError, match=r"layers\.0: q_proj is quantized, the back end takes dense linears only"):
        engine(omniw4.load(tmp_path / "checkpoint"), backend="fp16")
