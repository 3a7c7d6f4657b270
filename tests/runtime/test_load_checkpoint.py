"""Loading a checkpoint: omniw4.load, transformers' from_pretrained, and what both refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import omniw4
from omniw4.checkpoint.header import read_header
from omniw4.errors import (
    CheckpointError,
    HashMismatchError,
    MissingFileError,
    MissingTensorError,
    ModelError,
    RenamedTensorError,
    TensorShapeError,
    UnexpectedTensorError,
    UsageError,
)
from omniw4.runtime.linear import W4A4Linear
from omniw4.runtime.swap import swap
from omniw4.tensors import LinearSpec
from problems import assert_same
from tiny_models import MODELS, write_checkpoint

IDS = torch.arange(24).reshape(2, 12) * 7 % 300
MIXED = {"down_proj": LinearSpec(act_bits=8, rank=0), "o_proj": LinearSpec(rank=8, smooth=True)}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def auto(folder: Path, **options: object) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def native(folder: Path, dtype: torch.dtype) -> nn.Module:
    return omniw4.load(folder, dtype=dtype)


LOADERS: dict[str, Callable[..., nn.Module]] = {"omniw4.load": native, "from_pretrained": auto}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A checkpoint, and the model that it must load as."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = MODELS[request.param]()
    swap(model, write_checkpoint(model, folder, LinearSpec(), MIXED))
    return folder / "checkpoint", model


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint to break."""
    write_checkpoint(MODELS["qwen3-bias"](), tmp_path, LinearSpec())
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("loader", LOADERS)
def test_loads_what_was_written(checkpoint: tuple[Path, nn.Module], loader: str) -> None:
    folder, model = checkpoint
    loaded = LOADERS[loader](folder, dtype=torch.float32)
    assert type(loaded) is type(model)
    assert not loaded.training
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert_same(state[name], tensor, name)
    assert sum(isinstance(module, W4A4Linear) for module in loaded.modules()) == 14
    assert_same(logits(loaded), logits(model), "logits")
    assert loaded.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loader", LOADERS)
def test_the_dtype_asked_for_is_the_dtype_got(
    checkpoint: tuple[Path, nn.Module], loader: str, dtype: torch.dtype
) -> None:
    folder, model = checkpoint
    loaded = LOADERS[loader](folder, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    for name, tensor in model.state_dict().items():
        if isinstance(model.get_submodule(name.rpartition(".")[0]), W4A4Linear):
            assert_same(loaded.state_dict()[name], tensor, name)
    swapped = auto(folder.parent / "source", dtype=dtype)
    swap(swapped, {p: m.quantized() for p, m in model.named_modules() if isinstance(m, W4A4Linear)})
    assert logits(loaded).dtype == dtype
    assert_same(logits(loaded), logits(swapped), "logits")


def test_auto_dtype(damaged: Path) -> None:
    assert omniw4.load(damaged).dtype == torch.float32  # 16-bit arithmetic is slow on a CPU
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert omniw4.load(damaged).dtype == torch.float32
    assert auto(damaged).dtype == torch.bfloat16
    assert omniw4.load(damaged, "cpu", "float16").dtype == torch.float16
    with pytest.raises(UsageError, match="unknown dtype 'int4'"):
        omniw4.load(damaged, dtype="int4")
    with pytest.raises(UsageError, match=r"unknown dtype 'torch.float64'"):
        omniw4.load(damaged, dtype=torch.float64)


def test_shards_and_the_backbone_alone(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    swap(model, write_checkpoint(model, tmp_path, LinearSpec(), MIXED, max_shard_size=60_000))
    assert len(list((tmp_path / "checkpoint").glob("model-*.safetensors"))) > 2
    assert_same(logits(omniw4.load(tmp_path / "checkpoint")), logits(model), "sharded")
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "checkpoint")
    assert type(backbone) is transformers.LlamaModel
    assert sum(isinstance(module, W4A4Linear) for module in backbone.modules()) == 14
    with torch.no_grad():
        assert_same(backbone(IDS).last_hidden_state, model.model(IDS).last_hidden_state, "backbone")


def test_one_linear(damaged: Path) -> None:
    path = "model.layers.1.self_attn.k_proj"
    linear = W4A4Linear.from_checkpoint(damaged, path)
    whole = omniw4.load(damaged).get_submodule(path)
    x = torch.randn(3, 128)
    assert_same(linear(x), whole(x), path)
    with pytest.raises(ModelError, match="checkpoint 'checkpoint' has no quantized linear 'lm_head'"):
        W4A4Linear.from_checkpoint(damaged, "lm_head")


def test_a_flipped_bit_is_found_where_hashes_are_asked_for(damaged: Path) -> None:
    omniw4.load(damaged, verify_hashes=True)
    weights = damaged / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    omniw4.load(damaged)  # as docs/checkpoint-format.md says
    with pytest.raises(HashMismatchError, match=r"model\.safetensors"):
        omniw4.load(damaged, verify_hashes=True)


@pytest.mark.parametrize(
    "setting", [{"hidden_act": 3}, {"dtype": [1]}, {"num_attention_heads": 0}, {"pad_token_id": 10**12}, {"a": 1e999}]
)
def test_a_config_that_transformers_stumbles_over_is_named(damaged: Path, setting: dict[str, object]) -> None:
    """It raises every class there is; what it does not mind, it does not read."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | setting))
    if "a" in setting:
        omniw4.load(damaged)
        return
    with pytest.raises(ModelError, match="cannot load checkpoint 'checkpoint': "):
        omniw4.load(damaged)


def test_millions_of_blocks_are_refused_at_once(damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config.pop("layer_types", None)
    (damaged / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**7}))
    with pytest.raises(ModelError, match="checkpoint 'checkpoint' has 10000000 num_hidden_layers, more than"):
        omniw4.load(damaged)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint and its own list of them, as a careless tool would."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    manifest = json.loads((folder / "omniw4.json").read_text())
    infos = read_header(folder / "model.safetensors").tensors
    manifest["tensors"] = {name: str(info) for name, info in infos.items()}
    manifest["files"]["model.safetensors"]["bytes"] = (folder / "model.safetensors").stat().st_size
    (folder / "omniw4.json").write_text(json.dumps(manifest))


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.norm.weight", "model.nrom.weight"),
        ("model.embed_tokens.weight", "model.embed_token.weight"),
        ("lm_head.weight", "lm_haed.weight"),
        ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.qnorm.weight"),
        ("model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.q_proj.qweights"),
        ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.bias_"),
    ],
)
def test_a_renamed_tensor_is_never_random(damaged: Path, loader: str, old: str, new: str) -> None:
    edit(damaged, rename(old, new))
    with pytest.raises(CheckpointError) as e:
        LOADERS[loader](damaged, dtype=torch.float32)
    assert old in e.value.message
    if not old.endswith(".qweight"):  # the reader misses it before any model is there
        assert new in e.value.message
        assert isinstance(e.value, RenamedTensorError)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_renamed_linear_is_never_random(damaged: Path, loader: str) -> None:
    """The whole linear under another path, config.json included: only the model can know."""
    old, new = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.upper_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    edit(damaged, change)
    for name in ("config.json", "omniw4.json"):
        (damaged / name).write_text((damaged / name).read_text().replace(f'"{old}"', f'"{new}"'))
    manifest = json.loads((damaged / "omniw4.json").read_text())
    del manifest["hash"]  # which knows the names as well, and may be left out by another writer
    (damaged / "omniw4.json").write_text(json.dumps(manifest))
    with pytest.raises(RenamedTensorError, match=f"{old}.weight.* unknown tensor '{new}"):
        LOADERS[loader](damaged, dtype=torch.float32)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.w_scales"])
def test_a_missing_tensor_is_never_random(damaged: Path, loader: str, name: str) -> None:
    edit(damaged, lambda tensors: tensors.pop(name))  # type: ignore[arg-type, return-value]
    with pytest.raises(MissingTensorError, match=name):
        LOADERS[loader](damaged, dtype=torch.float32)


@pytest.mark.parametrize("loader", LOADERS)
def test_another_shape_is_named(damaged: Path, loader: str) -> None:
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(TensorShapeError, match=r"down_proj' is \[128, 192\] in the checkpoint and \[128, 256\]"):
        LOADERS[loader](damaged, dtype=torch.float32)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 301}, TensorShapeError, r"'lm_head.weight' is \[300, 128\] in the checkpoint and \[301, 128\]"),
        ({"attention_bias": False}, UnexpectedTensorError, r"k_proj\.bias' is there, the model .* has none"),
        ({"num_hidden_layers": 3}, MissingTensorError, "lacks tensor 'model.layers.2"),
    ],
)
def test_a_config_of_another_model_is_named(
    damaged: Path, loader: str, change: dict[str, object], error: type, message: str
) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config.pop("layer_types", None)
    (damaged / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=message):
        LOADERS[loader](damaged, dtype=torch.float32)


def test_folders_that_are_no_checkpoint(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no checkpoint folder"):
        omniw4.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        omniw4.load(tmp_path / "source")
    (damaged / "omniw4.json").unlink()
    for loader in LOADERS.values():
        with pytest.raises(CheckpointError, match=r"omniw4\.json"):
            loader(damaged, dtype=torch.float32)


def test_truncated_weights_are_named(damaged: Path) -> None:
    data = (damaged / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        (damaged / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            omniw4.load(damaged)


def test_saving_and_quantizing_go_through_omniw4(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        auto(damaged).save_pretrained(tmp_path / "saved")
    config = transformers.AutoConfig.from_pretrained(damaged)
    with pytest.raises(ValueError, match="pre-quantized"):
        auto(tmp_path / "source", quantization_config=config.quantization_config)


@pytest.mark.parametrize(
    "imports",
    [
        "import omniw4; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import omniw4",
        "import transformers.quantizers.auto, omniw4; from transformers import AutoModelForCausalLM",
        "import omniw4.runtime.hf; from transformers import AutoModelForCausalLM",
    ],
)
def test_import_order_does_not_matter(damaged: Path, imports: str) -> None:
    """In a fresh process: ``import omniw4`` is all it takes."""
    script = f"{imports}; print(AutoModelForCausalLM.from_pretrained({str(damaged)!r}).model.layers[0].mlp.up_proj)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "W4A4Linear(in_features=128, out_features=192" in done.stdout, done.stderr


def test_importing_costs_no_torch() -> None:
    script = "import sys, omniw4; print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="has no attribute 'laod'"):
        omniw4.laod  # noqa: B018


def test_a_copy_loads_as_well(damaged: Path, tmp_path: Path) -> None:
    shutil.copytree(damaged, tmp_path / "elsewhere")
    assert_same(logits(omniw4.load(tmp_path / "elsewhere")), logits(omniw4.load(damaged)), "copy")
