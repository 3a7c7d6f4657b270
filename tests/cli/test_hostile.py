"""What a newcomer does by mistake and a hostile one on purpose: each one sentence, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CALIBRATE, Run
from safetensors.torch import load_file, save_file

from killing import folder_bytes

SMALL = ("--samples", 2, "--seq-len", 16)


def rewrite(folder: Path, change: Any, name: str = "model.safetensors") -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / name, metadata={"format": "pt"})


def thrice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 3 * tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def nearest(run: Run, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nearest") / "out"
    assert run("quantize", qwen3, "--config", "rtn", "--out", out).code == 0
    return out


@pytest.fixture
def model(qwen3: Path, tmp_path: Path) -> Path:
    return shutil.copytree(qwen3, tmp_path / qwen3.name)


@pytest.mark.parametrize("name", ["model_old.safetensors", "zzz.safetensors", "adapter_model.safetensors", "index"])
def test_other_weights_in_the_folder_are_not_the_models(
    run: Run, model: Path, nearest: Path, tmp_path: Path, name: str
) -> None:
    """A backup, an adapter, the shards of an earlier save: what transformers loads is what is quantized."""
    if name == "index":
        rewrite(model, thrice, name := "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(model / name), name)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        rewrite(model, thrice, name)
    assert run("quantize", model, "--config", "rtn", "--out", tmp_path / "out").code == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(nearest)


def test_a_copy_beside_the_weights_leaves_the_statistics_valid(
    run: Run, qwen3: Path, stats: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(qwen3, tmp_path / "model")
    shutil.copy(model / "model.safetensors", model / "model_old.safetensors")
    ran = run("quantize", model, "--stats", stats, "--dry-run")
    assert ran.code == 0, ran.stderr


def test_other_models_below_the_models_folder_are_left_there(
    run: Run, model: Path, nearest: Path, tmp_path: Path
) -> None:
    """Results of earlier runs, and what a training saved: neither are parts of the model."""
    shutil.copy(model / "model.safetensors", model / "model.safetensors.bak")
    for name, note in (("checkpoint-500", "trainer_state.json"), ("best", "notes.txt")):
        shutil.copytree(model, model.parent / name)
        (model.parent / name / note).write_text("{}")
        shutil.move(model.parent / name, model / name)
    shutil.copytree(nearest, model / "w4a4")
    assert run("export", nearest, "--dequantize", "--out", model / "plain").code == 0
    assert run("quantize", model, "--config", "rtn", "--out", model / "again").code == 0
    assert folder_bytes(model / "again") == folder_bytes(nearest)
    assert run("export", model / "again", "--dequantize", "--out", tmp_path / "plain").code == 0
    assert folder_bytes(tmp_path / "plain") == folder_bytes(model / "plain")


@pytest.fixture
def tokenizer_of(qwen3: Path) -> Any:
    def copy(folder: Path) -> Path:
        for file in qwen3.glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder

    return copy


def test_experts_that_are_no_linears_are_told(run: Run, tokenizer_of: Any, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 384}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=128)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    command = ("quantize", tokenizer_of(tmp_path / "moe"), "--config", "rtn", "--out", tmp_path / "out")
    for flags in (("--dry-run",), ("--overwrite",)):
        assert "89% of the weights" in json.loads(run(*command, *flags, "--json").stdout)["warnings"][0]
    ran = run(*command, "--overwrite")
    assert ran.code == 0, ran.stderr
    assert (
        "warning: 89% of the weights stay as they are, as no nn.Linear holds them, such as model.layers.0" in ran.stderr
    )


@pytest.mark.parametrize("offload", [(), ("--offload",)])
def test_an_encoder_is_refused_alike_from_disk_and_from_memory(
    run: Run, tokenizer_of: Any, text: Path, tmp_path: Path, offload: tuple[str, ...]
) -> None:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=384)).save_pretrained(tmp_path / "bert")
    model = tokenizer_of(tmp_path / "bert")
    ran = run("calibrate", model, "--dataset", text, "--out", tmp_path / "st", *CALIBRATE, *offload)
    ran.failed(2, "BertEncoder cannot be run on input_ids", "\n\nhint: ")


INDEX = "model.safetensors.index.json"


def _shard(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _integers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.int8) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


def _fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.to(torch.float8_e4m3fn) if t.dim() == 2 else t for name, t in tensors.items()}


def _config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


MODELS: dict[str, tuple[Any, str]] = {
    "a shard that is missing": (lambda f: _shard(f, {"x": "a.safetensors", "y": "b.safetensors"}), "'b.safetensors'"),
    "a shard elsewhere": (lambda f: _shard(f, {"x": "../a.safetensors"}), "which is not in its folder"),
    "an index of numbers": (lambda f: _shard(f, {"x": 3}), "is no index of weights"),
    "an empty index": (lambda f: _shard(f, {}), "names no file"),
    "a name of its own": (
        lambda f: (f / "model.safetensors").rename(f / "w.safetensors"),
        "'w.safetensors' holds them",
    ),
    "integers": (lambda f: rewrite(f, _integers), "has the type I8: the model is already quantized"),
    "FP8": (lambda f: rewrite(f, _fp8), "has the type F8_E4M3: the model is already quantized"),
    "weights named in config.json": (
        lambda f: _config(f, transformers_weights="x.safetensors"),
        "transformers_weights",
    ),
    "a type that is no name": (lambda f: _config(f, model_type=["qwen3"]), "transformers refuses config.json of model"),
    "no such type": (lambda f: _config(f, model_type="nosuch"), "transformers has no model type 'nosuch'"),
    "code of its own": (
        lambda f: _config(f, model_type="nosuch", auto_map={"AutoModelForCausalLM": "a.B"}),
        "--trust-remote-code",
    ),
    "settings that do not go together": (
        lambda f: _config(f, num_hidden_layers=7, layer_types=["full_attention"]),
        "transformers refuses config.json of model",
    ),
    "a head that is not there": (lambda f: _config(f, tie_word_embeddings=False), "it lacks lm_head.weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_none(run_quietly: Any, model: Path, tmp_path: Path, name: str) -> None:
    change, words = MODELS[name]
    change(model)
    before = sorted(p.name for p in tmp_path.iterdir())
    for verb in (
        ("calibrate", model, "--out", tmp_path / "st", *CALIBRATE),
        ("quantize", model, "--config", "rtn", "--out", tmp_path / "out"),
        ("generate", model, "--out", tmp_path / "own.jsonl", *SMALL),
    ):
        ran = run_quietly(*verb, "--quiet")
        ran.failed(2, words, "\n\nhint: ")
        assert len(ran.stderr.strip().splitlines()) == 3, "one sentence and a hint, nothing of the libraries'"
        assert len(ran.stderr) < 500
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.fixture
def run_quietly(run: Run, capfd: pytest.CaptureFixture[str]) -> Any:
    """:func:`run`, with what libraries say past sys.stderr."""

    def go(*arguments: Any) -> Any:
        capfd.readouterr()
        ran = run(*arguments)
        past = capfd.readouterr()
        assert (past.out, past.err) == ("", "")
        return ran

    return go


def test_two_shards_with_one_tensor(run: Run, model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "b.safetensors")
    _shard(model, {"x": "a.safetensors", "y": "b.safetensors"})
    ran = run("quantize", model, "--config", "rtn", "--out", tmp_path / "out")
    ran.failed(2, "both 'a.safetensors' and 'b.safetensors' hold a tensor", "\n\nhint: ")


def test_inputs_inside_the_output_are_not_replaced(
    run: Run, qwen3: Path, stats: Path, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(checkpoint, tmp_path / "old")
    shutil.copytree(stats, old / "stats")
    shutil.copytree(qwen3, old / "model")
    before = folder_bytes(tmp_path)
    for options in (("--stats", old / "stats"), ("--stats", stats)):
        model = qwen3 if options[1] != stats else old / "model"
        ran = run("quantize", model, *options, "--out", old, "--overwrite")
        ran.failed(2, "lies in the output folder", "\n\nhint: ")
    results = shutil.copytree(stats, tmp_path / "results")
    shutil.copy(text, results / "text.txt")
    shutil.copytree(checkpoint, results / "checkpoint")
    for options in (("--dataset", results / "text.txt"), ("--through", results / "checkpoint")):
        ran = run("calibrate", qwen3, *options, "--out", results, "--overwrite", *CALIBRATE)
        ran.failed(2, "lies in the output folder", "\n\nhint: ")
    assert before == {name: data for name, data in folder_bytes(tmp_path).items() if not name.startswith("results/")}
    assert (results / "checkpoint" / "omniw4.json").is_file()


def test_links_to_themselves(run: Run, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for verb in (
        ("calibrate", qwen3, "--out", "loop", *CALIBRATE),
        ("quantize", qwen3, "--config", "rtn", "--out", "loop"),
        ("generate", qwen3, "--out", "loop/own.jsonl", *SMALL),
        ("calibrate", "./loop", "--out", "st", *CALIBRATE),
        ("repack", "loop"),
        ("inspect", "loop"),
        ("verify", "loop", "--model", qwen3),
    ):
        run(*verb).failed(2, "loop", "\n\nhint: ")
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


def test_a_linear_of_zeros_is_exact_and_hides_no_other(run: Run, model: Path, tmp_path: Path) -> None:
    def zeroed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.0.self_attn.q_proj.weight"].zero_()
        return tensors

    rewrite(model, zeroed)
    ran = run("quantize", model, "--config", "rtn", "--out", tmp_path / "out")
    assert ran.code == 0
    assert "nan" not in ran.stdout + ran.stderr
    assert "worst inf" not in ran.stdout
    rows = json.loads(run("inspect", tmp_path / "out", "--layers", "--json").stdout)["layers"]
    assert next(row for row in rows if row["path"].endswith("0.self_attn.q_proj"))["relative_error"] == 0


@pytest.mark.parametrize("count", [10**12, 10**24])
def test_counts_beyond_all_memory(run: Run, qwen3: Path, text: Path, tmp_path: Path, count: int) -> None:
    ran = run("generate", qwen3, "--out", tmp_path / "own.jsonl", "--samples", count, "--seq-len", 16)
    ran.failed(2, f"{count} texts of 16 tokens", "\n\nhint: ")
    assert list(tmp_path.iterdir()) == []
    command = ("calibrate", qwen3, "--dataset", text, "--out", tmp_path / "st", "--samples", count, "--seq-len", 64)
    ran = run(*command, "--strict")
    ran.failed(2, f"asked for {count} samples")


def test_a_file_of_another_kind_as_config(run: Run, qwen3: Path, tmp_path: Path) -> None:
    ran = run("calibrate", qwen3, "--out", tmp_path / "st", "--config", qwen3 / "config.json")
    ran.failed(2, "there is no key", " more", "\n\nhint: ")
    assert len(ran.stderr) < 1000


def test_a_device_that_torch_was_not_built_for(run: Run, qwen3: Path, tmp_path: Path) -> None:
    ran = run("quantize", qwen3, "--config", "rtn", "--out", tmp_path / "out", "--device", "mps")
    ran.failed(2, "--device mps", "\n\nhint: ")
    assert len(ran.stderr) < 400
