"""Every mistake a user can make: one sentence, a hint, exit code 2, and nothing that a later command would accept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import CALIBRATE, Ran, Run, save_model


def refused(ran: Ran, tmp_path: Path, *words: str) -> None:
    """Exit code 2 with a hint, nothing on stdout, and no output folder or leftover of one."""
    ran.failed(2, *words, "\n\nhint: ")
    assert ran.stdout == ""
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith("out")]
    assert left == [], "a refused command left something behind"


@pytest.mark.parametrize("verb", ["calibrate", "quantize"])
@pytest.mark.parametrize("model", ["no/such/folder/at/all", "./missing", "/no/such"])
def test_missing_model(run: Run, tmp_path: Path, verb: str, model: str) -> None:
    refused(run(verb, model, "--out", tmp_path / "out"), tmp_path, model)


def test_a_hub_name_without_a_network(run: Run, tmp_path: Path) -> None:
    refused(run("calibrate", "nobody/nothing", "--out", tmp_path / "out"), tmp_path, "nobody/nothing")


def test_folder_without_config(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(run("calibrate", tmp_path / "empty", "--out", tmp_path / "out"), tmp_path, "config.json")


def test_gguf_without_the_flag(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.gguf").write_bytes(b"GGUF")
    for verb in ("calibrate", "quantize"):
        refused(run(verb, folder, "--out", tmp_path / "out"), tmp_path, "--gguf-file weights.gguf")


def test_gguf_flag_of_a_missing_file(run: Run, qwen3: Path, tmp_path: Path) -> None:
    ran = run("calibrate", qwen3, "--gguf-file", "q.gguf", "--out", tmp_path / "out")
    refused(ran, tmp_path, "q.gguf", "--gguf-file")


def test_unknown_architecture(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="mystery9", architectures=["MysteryForCausalLM"])
    (folder / "config.json").write_text(json.dumps(config))
    for verb in ("calibrate", "quantize"):
        refused(run(verb, folder, "--out", tmp_path / "out"), tmp_path, "architecture", "mystery9")


def test_a_model_without_linears_in_blocks(run: Run, qwen3: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=384, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    refused(run("quantize", tmp_path / "model", "--config", "rtn", "--out", tmp_path / "out"), tmp_path, "nn.Linear")


def test_weights_of_another_shape(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    ran = run("calibrate", folder, "--out", tmp_path / "out", *CALIBRATE)
    ran.failed(2, "do not fit", "hint: ")
    assert not (tmp_path / "out").exists()


def test_truncated_weights(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(run("quantize", folder, "--config", "rtn", "--out", tmp_path / "out"), tmp_path, "model.safetensors")


def test_an_already_quantized_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    refused(run("calibrate", checkpoint, "--out", tmp_path / "out"), tmp_path, "already quantized")


def test_group_that_does_not_divide_is_found_before_the_first_forward(run: Run, tmp_path: Path) -> None:
    odd = save_model(tmp_path / "odd", intermediate_size=200)
    for options in (("--dry-run",), ("--out", tmp_path / "out", "--config", "rtn")):
        ran = run("quantize", odd, *options)
        refused(ran, tmp_path, "group_size 64 does not divide", "down_proj", "200", "--skip")
        assert "and 0 more" not in ran.stderr
    ran = run("quantize", odd, "--config", "rtn", "--out", tmp_path / "fine", "--skip", "*.down_proj", "--quiet")
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize("flag", ["--include", "--skip", "--override"])
def test_a_pattern_that_matches_nothing(run: Run, qwen3: Path, tmp_path: Path, flag: str) -> None:
    pattern = "*.dawn_proj" + ":rank=8" * (flag == "--override")
    ran = run("quantize", qwen3, "--config", "rtn", "--out", tmp_path / "out", flag, pattern)
    refused(ran, tmp_path, flag, "*.dawn_proj", "matches none")


def test_a_malformed_pattern(run: Run, qwen3: Path, tmp_path: Path) -> None:
    ran = run("quantize", qwen3, "--config", "rtn", "--out", tmp_path / "out", "--skip", "re:(")
    ran.failed(2, "re:(")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "nowhere"], ["nowhere", "seed"]),
        (["--set", "recipe.lowrank.rank=300"], ["recipe.lowrank.rank"]),
        (["--set", "recipe.lowrnak=1"], ["recipe.lowrnak"]),
        (["--set", "nonsense"], ["--set", "KEY=VALUE"]),
        (["--override", "*"], ["--override"]),
        (["--max-shard-size", "big"], ["--max-shard-size"]),
        (["--device", "cuda:99"], ["cuda"]),
        (["--device", "toaster"], ["toaster"]),
        (["--dtype", "float7"], ["float7"]),
    ],
)
def test_wrong_options(run: Run, qwen3: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    ran = run("quantize", qwen3, "--out", tmp_path / "out", "--config", "rtn", *options)
    refused(ran, tmp_path, *words)


def test_out_is_missing(run: Run, qwen3: Path, tmp_path: Path) -> None:
    refused(run("quantize", qwen3, "--config", "rtn"), tmp_path, "--out")


def test_a_recipe_that_needs_statistics(run: Run, qwen3: Path, tmp_path: Path) -> None:
    refused(run("quantize", qwen3, "--out", tmp_path / "out"), tmp_path, "--stats", "rtn")


def test_statistics_of_another_model(run: Run, stats: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    ran = run("quantize", other, "--stats", stats, "--out", tmp_path / "out")
    refused(ran, tmp_path, "another model", "omniw4 calibrate")


def test_statistics_that_are_missing_or_damaged(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    command = ("quantize", qwen3, "--out", tmp_path / "out", "--stats")
    refused(run(*command, tmp_path / "none"), tmp_path, "none")
    torn = shutil.copytree(stats, tmp_path / "torn")
    (torn / "stats.json").unlink()
    refused(run(*command, torn), tmp_path, "stats.json")
    cut = shutil.copytree(stats, tmp_path / "cut")
    data = (cut / "stats.safetensors").read_bytes()
    (cut / "stats.safetensors").write_bytes(data[: len(data) // 2])
    run(*command, cut).failed(2, "stats.safetensors")


def test_statistics_that_lack_a_linear(run: Run, qwen3: Path, stats: Path, tmp_path: Path) -> None:
    ran = run("quantize", qwen3, "--stats", stats, "--out", tmp_path / "out", "--include", "*")
    refused(ran, tmp_path, "lm_head", "--skip")


@pytest.mark.parametrize(("verb", "marker"), [("calibrate", "stats.json"), ("quantize", "omniw4.json")])
def test_existing_output_is_refused_and_untouched(
    run: Run, qwen3: Path, stats: Path, text: Path, tmp_path: Path, verb: str, marker: str
) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    options: tuple[Any, ...] = ("--dataset", text, *CALIBRATE) if verb == "calibrate" else ("--stats", stats)
    ran = run(verb, qwen3, "--out", out, *options)
    ran.failed(2, "exists", "--overwrite")
    run(verb, qwen3, "--out", out, *options, "--overwrite").failed(2, marker, "--out")
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    (out / marker).write_text("{}")  # now it looks like an earlier result, and is replaced whole
    ran = run(verb, qwen3, "--out", out, *options, "--overwrite")
    assert ran.code == 0, ran.stderr
    assert not (out / "thesis.txt").exists()


def test_the_source_model_is_not_overwritten(run: Run, qwen3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(qwen3, model)
    before = sorted(p.name for p in model.iterdir())
    run("quantize", model, "--config", "rtn", "--out", model, "--overwrite").failed(2, "omniw4.json")
    assert sorted(p.name for p in model.iterdir()) == before


def test_damaged_weights_are_not_repacked(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    file = damaged / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run("repack", damaged, "--layout", "wgmma_s8").failed(2, "model.safetensors")
    assert not (damaged / ".omniw4-cache").exists()
    file.write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    assert run("repack", damaged, "--layout", "wgmma_s8").code == 0
    file.write_bytes(data)  # a cache that was there does not hide the damage
    run("repack", damaged, "--layout", "wgmma_s8").failed(2, "model.safetensors")


def test_a_failed_overwrite_leaves_the_old_output(run: Run, qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "old"
    out.mkdir()
    (out / "stats.json").write_text("old")
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xff\xfe")
    run("calibrate", qwen3, "--dataset", broken, "--out", out, "--overwrite").failed(2, "broken.txt")
    assert [(p.name, p.read_text()) for p in out.iterdir()] == [("stats.json", "old")]


def test_output_is_a_file(run: Run, qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        ran = run("quantize", qwen3, "--config", "rtn", "--out", out)
        ran.failed(2, str(tmp_path / "file"))


def test_a_folder_that_cannot_be_written(run: Run, qwen3: Path) -> None:
    """/proc refuses new folders to everyone, root included."""
    for verb, options in (("calibrate", CALIBRATE), ("quantize", ("--config", "rtn"))):
        ran = run(verb, qwen3, "--out", "/proc/omniw4-out", *options)
        ran.failed(2, "/proc/omniw4-out")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, ["missing.txt"]),
        ("empty.txt", b"", ["holds no text"]),
        ("blank.txt", b" \n ", ["holds no text"]),
        ("tiny.txt", b"abc", ["3 tokens", "at least 8"]),
        ("binary.txt", b"\xff\xfe\x00", ["UTF-8"]),
        ("text.csv", b"a,b", [".csv", ".jsonl"]),
        ("bad.jsonl", b'{"text": ', ["line 1", "JSON"]),
        ("field.jsonl", b'{"body": "x"}', ["line 1", "text", "body"]),
        ("bad.parquet", b"PAR1", ["parquet"]),
    ],
)
def test_datasets(run: Run, qwen3: Path, tmp_path: Path, name: str, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    ran = run("calibrate", qwen3, "--dataset", path, "--out", tmp_path / "out", *CALIBRATE)
    ran.failed(2, name, *words, "\n\nhint: ")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_too_little_text_is_told_and_strict_refuses_it(run: Run, qwen3: Path, text: Path, tmp_path: Path) -> None:
    command = ("calibrate", qwen3, "--dataset", text, "--samples", 5000, "--seq-len", 64)
    refused(run(*command, "--out", tmp_path / "out", "--strict"), tmp_path, "asked for 5000 samples", "--strict")
    ran = run("calibrate", qwen3, "--dataset", text, "--samples", 3, "--seq-len", 64, "--out", tmp_path / "fine")
    assert ran.code == 0, ran.stderr
    assert "warning: " in ran.stderr


def test_dataset_and_source_exclude_each_other(run: Run, qwen3: Path, text: Path, tmp_path: Path) -> None:
    ran = run("calibrate", qwen3, "--dataset", text, "--source", "x.safetensors", "--out", tmp_path / "out")
    refused(ran, tmp_path, "--dataset", "--source")


def test_text_for_a_model_without_a_tokenizer(run: Run, qwen3: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    ran = run("calibrate", folder, "--dataset", text, "--out", tmp_path / "out", *CALIBRATE)
    refused(ran, tmp_path, "tokenizer", "--source")


@pytest.mark.parametrize("verb", ["repack", "verify", "inspect", "bench"])
def test_a_folder_that_is_no_checkpoint(run: Run, qwen3: Path, tmp_path: Path, verb: str) -> None:
    options = ("--model", qwen3) if verb == "verify" else ()
    for folder in (tmp_path / "none", qwen3):
        run(verb, folder, *options).failed(2)


def test_unknown_layout_and_arch(run: Run, checkpoint: Path) -> None:
    run("repack", checkpoint, "--layout", "mma_s3").failed(2, "mma_s3", "wgmma_s8")
    run("repack", checkpoint, "--arch", "ninety").failed(2, "ninety")
    run("repack", checkpoint, "--arch", "75").failed(2, "7.5")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--what", "everything"], ["everything"]),
        (["--what", "model"], ["DIR"]),
        (["--shapes", "16x64"], ["MxNxK"]),
        (["--shapes", "16x64x100"], ["64"]),
        (["--prefill", "2"], ["BATCHxTOKENS"]),
    ],
)
def test_bench_options(run: Run, options: list[str], words: list[str]) -> None:
    run("bench", *options).failed(2, *words)


def test_verify_with_too_short_a_text(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    ran = run("verify", checkpoint, "--model", qwen3, "--dataset", short, "--seq-len", 64)
    ran.failed(2, "tokens", "--seq-len")


def test_a_model_without_a_walkable_backbone(
    run: Run, text: Path, qwen3: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """BERT's encoder wants hidden states; and it is not the model that the checkpoint was made from."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=384, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    bert = tmp_path / "bert"
    transformers.BertModel(config).save_pretrained(bert)
    transformers.AutoTokenizer.from_pretrained(qwen3).save_pretrained(bert)
    refused(run("calibrate", bert, "--dataset", text, "--out", tmp_path / "out", *CALIBRATE), tmp_path, "hidden_states")
    run("verify", checkpoint, "--model", bert, "--dataset", text).failed(2, "no linear", "--model")
