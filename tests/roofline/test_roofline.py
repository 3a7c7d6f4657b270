"""The table: what is counted, for models, checkpoints and GPUs; the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from omniw4 import roofline
from omniw4.errors import UsageError
from omniw4.roofline import cost
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint

H200, A100, L4 = (roofline.get(name) for name in ("h200", "A100", "l4"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roofline")
    write_checkpoint(qwen3(), folder, LinearSpec(rank=8))
    return folder


def test_a_w4a4_linear_counts_every_tensor_it_reads_and_writes() -> None:
    """Against the sizes of real tensors in the canonical layout."""
    m, n, k, r = 33, 192, 128, 16
    sizes = {
        "x": torch.empty(m, k, dtype=torch.float16), "qact": torch.empty(m, k // 2, dtype=torch.uint8),
        "a_scales": torch.empty(m, k // 64, dtype=torch.float16), "lora_act": torch.empty(m, r),
        "proj_down": torch.empty(k, r, dtype=torch.float16), "proj_up": torch.empty(n, r, dtype=torch.float16),
        "qweight": torch.empty(n, k // 2, dtype=torch.uint8), "w_scales": torch.empty(n, k // 64, dtype=torch.float16),
        "y": torch.empty(m, n, dtype=torch.float16),
    }  # fmt: skip
    total = {name: tensor.nbytes for name, tensor in sizes.items()}
    quantize, gemm = cost.linear(L4, "w4a4", m, n, k, r)
    made = total["qact"] + total["a_scales"] + total["lora_act"]
    assert quantize.bytes == total["x"] + total["proj_down"] + made
    assert gemm.bytes == made + total["qweight"] + total["w_scales"] + total["proj_up"] + total["y"]
    assert gemm.ops == {"int4": 2 * m * n * k, "fp16": 2 * m * n * r}
    assert quantize.ops == {"fp16": 2 * m * k * r}


def test_a_gpu_without_int4_multiplies_bytes() -> None:
    _, gemm = cost.linear(H200, "w4a4", 64, 128, 128)
    assert set(gemm.ops) == {"int8"}
    assert "int4" in cost.linear(A100, "w4a4", 64, 128, 128)[1].ops


def test_a_gpu_without_fp8_has_no_fp8_column() -> None:
    result = roofline.compute(roofline.omnivoice(), A100, 256)
    assert all(row.times["fp8"] is None for row in result.rows)
    assert result.total_us("fp8") is None
    assert result.total_us("w4a4") is not None


def test_omnivoice_has_196_linears_and_its_parameters() -> None:
    backbone = roofline.omnivoice()
    assert sum(op.count for op in backbone.linears) == 196
    assert sum(op.count * op.n * op.k for op in backbone.linears) == 28 * 15 * 1024**2
    fused = backbone.fused()
    assert [(op.name, op.n) for op in fused.linears] == [
        ("self_attn.qkv_proj", 4096), ("self_attn.o_proj", 1024), ("mlp.gate_up_proj", 6144), ("mlp.down_proj", 1024),
    ]  # fmt: skip
    assert sum(op.count * op.n * op.k for op in fused.linears) == 28 * 15 * 1024**2
    assert [op.name for op in fused.norms] == ["input_layernorm", "post_attention_layernorm", "norm"]


def test_fused_is_never_slower() -> None:
    """Of what both count: linears and attention."""
    for width in roofline.WIDTHS:
        apart = roofline.compute(roofline.omnivoice(), H200, 704).total_us(width, kind="linear")
        together = roofline.compute(roofline.omnivoice(), H200, 704, fused=True).total_us(width, kind="linear")
        assert apart is not None
        assert together is not None
        assert together < apart


def test_a_fused_step_has_what_the_engine_launches() -> None:
    """Nine kernels a layer in FP16, ten with quantizers (docs/engine.md), and the last norm."""
    result = roofline.compute(roofline.omnivoice(), H200, 704, fused=True)
    kernels = dict.fromkeys(roofline.WIDTHS, 0)
    for row in result.rows:
        for width, time in row.times.items():
            kernels[width] += row.count * (time.kernels if time else 0)
    assert kernels["fp16"] == 28 * 9 + 1  # residual sums go with the norms
    assert kernels["w4a4"] == kernels["w4a8"] == kernels["fp8"] == 28 * 10 + 1
    assert {row.op for row in result.rows} >= {"q/k-norm, rotary", "SwiGLU", "self_attn.qkv_proj", "mlp.gate_up_proj"}


def test_model_and_checkpoint_give_the_same_shapes(model: Path) -> None:
    source = roofline.of_source(str(model / "source"), 8)
    quantized = roofline.of_checkpoint(model / "checkpoint")
    assert source.linears == quantized.linears
    parts = [op.name.rpartition(".")[2] for op in quantized.linears]
    assert parts == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "as they run"
    assert set(source.norms) == set(quantized.norms)
    assert (source.layers, source.heads, source.kv_heads, source.head_dim) == (2, 4, 2, 32)
    assert (quantized.layers, quantized.heads, quantized.kv_heads, quantized.head_dim) == (2, 4, 2, 32)
    assert {(n.name, n.elements, n.count) for n in source.norms if "q_norm" in n.name} == {("self_attn.q_norm", 128, 2)}


def test_linears_of_unknown_roles_keep_their_place() -> None:
    shapes = {f"layers.0.{name}": (64, 64, 0) for name in ("mlp.down_proj", "mlp.router", "self_attn.q_proj")}
    backbone = roofline.of_config("x", {"num_attention_heads": 1, "hidden_size": 64}, shapes, {})
    assert [op.name for op in backbone.linears] == ["self_attn.q_proj", "mlp.router", "mlp.down_proj"]


def test_attention_counts_the_square_of_each_sequence() -> None:
    one, two = (roofline.compute(roofline.omnivoice(), H200, 704, sequences=n) for n in (1, 2))
    ops = [next(row.ops for row in r.rows if row.kind == "attention") for r in (one, two)]
    assert ops[0] == 4 * 704**2 * 16 * 128 == 2 * ops[1]
    causal = roofline.compute(roofline.omnivoice(), H200, 704, causal=True)
    assert next(row.ops for row in causal.rows if row.kind == "attention") == ops[0] / 2


def test_every_gpu_names_its_sources_and_dense_rates() -> None:
    for gpu in roofline.known().values():
        assert gpu.sources
        assert gpu.rates["int8"] == pytest.approx(
            (gpu.rates["fp16"] or 0) * (4 if gpu.name == "RTX4090" else 2), rel=1e-2
        )
        assert gpu.rates["int4"] in (None, pytest.approx(2 * (gpu.rates["int8"] or 0)))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA L4", "L4"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GeForce RTX 3090", None),
    ],
)  # fmt: skip
def test_a_driver_s_name_finds_its_gpu(device: str, name: str | None) -> None:
    found = roofline.of_device(device)
    assert (found.name if found else None) == name


def test_unknown_gpu() -> None:
    with pytest.raises(UsageError, match="no GPU 'T4'") as caught:
        roofline.get("T4")
    assert "L4" in caught.value.hint


def test_bad_numbers_of_tokens() -> None:
    from omniw4.cli.roofline import parse_tokens

    assert parse_tokens("1, 704") == [1, 704]
    for text in ("0", "x", "", "1,-2", "1.5"):
        with pytest.raises(UsageError, match="--tokens"):
            parse_tokens(text)
    assert parse_tokens("1048576,00000000007") == [1 << 20, 7]
    for text, found in (("1048577", "1048577"), ("9" * 20, "9" * 20), ("704," + "9" * 5000, "a number of 5000 digits")):
        with pytest.raises(UsageError, match=f"at most 1048576 tokens a forward, found {found}$"):
            parse_tokens(text)


def test_the_document_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    from omniw4.cli import app

    assert app.run(["roofline", "--gpu", "L4", "--tokens", "700", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    q_proj = next(row for row in document["rows"] if row["op"] == "self_attn.q_proj")
    assert q_proj["ops"] == 2 * 700 * 2048 * 1024
    assert q_proj["times"]["fp16"]["ideal_us"] == pytest.approx(28.3, rel=2e-3)
    assert app.run(["roofline", "--gpu", "L4", "--tokens", "700", "--ideal"]) == 0
    told = capsys.readouterr().out
    row = next(line for line in told.splitlines() if line.startswith("self_attn.q_proj"))
    assert "28.3" in row
    assert "1.33x" in row


def test_user_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from omniw4.cli import app

    for arguments in (["--gpu", "T4"], ["--tokens", "0"], [str(tmp_path / "missing")], ["--rank", "300"]):
        assert app.run(["roofline", *arguments]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("error: ")
    if not torch.cuda.is_available():
        assert app.run(["roofline", "--gpu", "auto"]) == 2
        assert "no CUDA device" in capsys.readouterr().err
