"""Source models: loaded whole or refused by name; blocks and linears found in any decoder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omniw4 import model
from omniw4.errors import ModelError, UsageError
from tiny_models import MODELS, llama, qwen3


class Wrapper(nn.Module):
    """OmniVoice's structure: the backbone under ``llm``, other linears and lists beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(128, 8) for _ in range(4))
        self.llm = qwen3().model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qwen3(tie_word_embeddings=True).half().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("build", "backbone"), [(qwen3, "model"), (llama, "model"), (Wrapper, "llm"), (lambda: qwen3().model, "")]
)
def test_blocks_and_linears_of_any_decoder(build: Callable[[], nn.Module], backbone: str) -> None:
    tree = build()
    dot = f"{backbone}." if backbone else ""
    assert model.find_backbone(tree) == (backbone, tree.get_submodule(backbone))
    assert [path for path, _ in model.find_blocks(tree)] == [f"{dot}layers.0", f"{dot}layers.1"]
    linears = model.block_linears(tree)
    assert len(linears) == 14
    for path, linear in linears.items():
        assert tree.get_submodule(path) is linear
    assert linears.keys() <= model.find_linears(tree).keys()


def test_every_linear_is_listed_with_its_shape() -> None:
    shapes = model.shapes(MODELS["llama-bias"]())
    assert shapes["model.layers.1.mlp.down_proj"] == model.LinearShape(128, 192, True)
    assert shapes["model.layers.0.self_attn.k_proj"] == model.LinearShape(64, 128, True)
    assert shapes["lm_head"] == model.LinearShape(300, 128, False)


def test_a_model_without_blocks_is_refused() -> None:
    for tree in (nn.Sequential(nn.Linear(8, 8)), nn.ModuleList([nn.ReLU()])):
        with pytest.raises(ModelError, match="no repeated blocks"):
            model.find_blocks(tree)


def test_a_folder_loads_as_it_was_saved(folder: Path) -> None:
    loaded = model.load(folder)
    wanted = qwen3(tie_word_embeddings=True).half().state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.float()), name
    assert not loaded.model.training
    assert (loaded.source, loaded.folder, loaded.tokenizer) == (str(folder), folder, None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_asked_for_is_the_dtype_given(folder: Path, dtype: str) -> None:
    loaded = model.load(folder, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {model.DTYPES[dtype]}


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        model.load(folder, dtype="int8")


def test_a_skeleton_has_the_shapes_and_no_weights(folder: Path) -> None:
    skeleton = model.skeleton(folder)
    assert model.shapes(skeleton) == model.shapes(model.load(folder).model)
    assert all(p.is_meta for p in skeleton.parameters())


def test_the_hash_is_of_config_and_weights(folder: Path) -> None:
    before = model.load(folder).hash
    (folder / "tokenizer.json").write_text("{}")
    assert model.hash_source(folder) == before
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = model.hash_source(folder)
    assert changed != before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert model.hash_source(folder) not in (before, changed)


def edit_config(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return apply


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return apply


def truncate(folder: Path) -> None:
    cut(folder, 1000)


def cut(folder: Path, end: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"'.*source' holds no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json of model 'source' is not readable JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
        (truncate, r"'model\.safetensors' is damaged \(1000 bytes found, at least \d{4,} expected\)"),
        (lambda f: cut(f, -1), r"'model\.safetensors' is damaged \(\d+ bytes found, \d+ expected\)"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), r"\(1 bytes found, at least 8 expected\)"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), r"\(23 bytes found\)"),
        (edit_config(model_type="no_such_model", architectures=["NoSuch"]), "unknown architecture of model 'source'"),
        (edit_config(quantization_config={"quant_method": "gptq"}), "already quantized by gptq"),
        (
            lambda f: (f / "config.json").write_text('{"a":' * 100_000),
            r"config\.json of model 'source' is not readable",
        ),
        (
            edit_config(num_hidden_layers=10**7, layer_types=None),
            "has 10000000 num_hidden_layers, more than the allowed",
        ),
        (edit_config(text_config={"num_hidden_layers": 10**400}), "has 10{19} num_hidden_layers, more than"),
        (edit_config(quantization_config=3), "has quantization_config '3', wanted a dict of names"),
        (edit_config(architectures=3), "has architectures '3', wanted a list of names"),
        (edit_config(architectures=[3]), r"has architectures '\[3\]', wanted a list of names"),
        (edit_config(auto_map="x"), "has auto_map 'x', wanted a dict of names"),
        (edit_weights(lambda w: w.update({UP + "x": w.pop(UP)})), rf"lacks {UP}; it has the unknown {UP}x"),
        (
            edit_weights(lambda w: w.update({UP: w[UP][:5].contiguous()})),
            rf"has other shapes for {UP} \(\[5, 128\], wanted \[192, 128\]\)",
        ),
    ],
)
def test_a_folder_that_is_wrong_is_refused_by_name(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as error:
        model.load(folder)
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nothing-here", "no model folder './nothing-here'"),
        ("/nowhere/at/all", "no model folder"),
        ("none.gguf", "no GGUF file 'none.gguf'"),
        ("", "no model folder ''"),
        ("no-one/no-such-model", "no folder 'no-one/no-such-model' here"),
    ],
)
def test_a_source_that_is_not_there(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        model.load(source)


@pytest.mark.parametrize(
    ("kind", "offline", "message", "hint"),
    [
        ("HFValidationError", False, "no folder 'a/b' here, and it is no name of a Hub model", "OWNER/NAME"),
        ("RepositoryNotFoundError", False, "no folder 'a/b' here, and no model of that name on the Hub", "the name"),
        ("GatedRepoError", False, "no folder 'a/b' here, and the Hub gives the model of that name to", "auth login"),
        (
            "LocalEntryNotFoundError",
            False,
            "no folder 'a/b' here and none in the Hub's cache, and the Hub c",
            "the path",
        ),
        ("OfflineModeIsEnabled", True, "no folder 'a/b' here and none in the Hub's cache, and HF_HUB_OFF", "the path"),
        ("RuntimeError", False, "no folder 'a/b' here, and downloading it from the Hub failed: what", "network"),
    ],
)
def test_what_the_hub_says_is_one_sentence_of_ours(
    kind: str, offline: bool, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    error = getattr(huggingface_hub.errors, kind, RuntimeError)
    told = error.__new__(error, "what it says\nin a paragraph\nof many lines")  # without the HTTP response it wants

    def refuse(*_: object, **__: object) -> None:
        raise told

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ModelError) as found:
        model.load("a/b")
    assert found.value.message.startswith(message)
    assert "\n" not in found.value.message
    assert "paragraph" not in found.value.message
    assert hint in found.value.hint


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file, wanted a model folder"):
        model.load(folder / "model.safetensors")


def test_an_omnivoice_without_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(model_type="omnivoice")(folder)
    for name in ("omnivoice", "omnivoice.models", "omnivoice.models.omnivoice"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match="package omnivoice cannot be imported") as error:
        model.load(folder)
    assert "pip install omnivoice" in error.value.hint


def write_gguf(path: Path) -> nn.Module:
    """A tiny Llama in GGUF's names, FP32, with a byte tokenizer."""
    source = llama(tie_word_embeddings=False, num_key_value_heads=4)  # GGUF permutes q and k; heads kept equal
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(192)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(297))])
    writer.add_token_types([1] * 300)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in source.state_dict().items():
        if name.startswith("model.layers."):
            block, part = name.split(".")[2], name.split(".")[-2]
            target = f"blk.{block}.{parts[part]}.weight"
            if part in ("q_proj", "k_proj"):  # llama.cpp interleaves the two halves of each rotary pair
                tensor = tensor.reshape(4, 2, 16, 128).swapaxes(1, 2).reshape(128, 128)
        else:
            target = names[name]
        writer.add_tensor(target, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source


def test_a_gguf_file_needs_its_flag_and_loads_dequantized(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"holds no config\.json") as error:
        model.load(tmp_path)
    assert error.value.hint == "name the GGUF file with `--gguf-file tiny.gguf`"
    with pytest.raises(ModelError, match=r"no GGUF file 'other\.gguf' .* it holds tiny\.gguf"):
        model.load(tmp_path, gguf_file="other.gguf")
    loaded = model.load(tmp_path, gguf_file="tiny.gguf")
    for name, tensor in source.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.tokenizer is not None
    assert loaded.hash == model.load(tmp_path / "tiny.gguf").hash == model.hash_source(tmp_path / "tiny.gguf")
    assert model.shapes(model.skeleton(tmp_path / "tiny.gguf")) == model.shapes(loaded.model)


def test_what_the_package_of_omnivoice_lacks_on_python_3_13() -> None:
    from omniw4.model.omnivoice import install_hint

    assert "audioop-lts" in install_hint(ModuleNotFoundError("No module named 'pyaudioop'"))
    assert install_hint(ModuleNotFoundError("No module named 'omnivoice'")) == "pip install omnivoice"
    absent = ModuleNotFoundError("No module named 'torchaudio'", name="torchaudio.functional")
    assert install_hint(absent) == "pip install torchaudio, which the package omnivoice imports"
