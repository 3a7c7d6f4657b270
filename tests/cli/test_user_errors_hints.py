"""Every error says what to do about it, and the hint is about the thing that is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import CALIBRATE, LAYERS, Ran, Run, save_model

from omniw4 import errors


def hint_of(ran: Ran, code: int = 2) -> str:
    """The hint of a command that ended with this code, nothing on stdout of a refusal."""
    ran.failed(code)
    _, found, hint = ran.stderr.partition("\n\nhint: ")
    assert found, f"no hint: {ran.stderr}"
    return hint.strip()


def test_every_class_of_user_errors_has_a_hint() -> None:
    """Those that only an API call can meet, a wrong tensor given to an op, have none."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OmniW4Error)]
    without = {c.__name__ for c in classes if not c("message").hint}
    assert without == {"OmniW4Error", "OpError"}
    assert errors.UsageError("message", hint="mine").hint == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"recipe: [", ["line 1", "not YAML"]),
        (b"a: b: c", ["line 1", "column 5"]),
        (b"recipe: {}\n\xff\xfe", ["not UTF-8", "byte 11"]),
        (b"- recipe\n", ["a list", "sections such as recipe"]),
        (b"hello", ["a text"]),
        (b"1: 2", ["no key 1"]),
        (b"x: !!python/object:os.system a", ["not YAML"]),
        (b"[" * 3000, ["cannot read"]),
    ],
)
def test_config_files_that_cannot_be_read(run: Run, tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    ran = run("quantize", "model", "--config", file, "--out", tmp_path / "out")
    ran.failed(2, "mine.yaml", *words)
    assert hint_of(ran)


@pytest.mark.parametrize(
    ("assignment", "said", "hint"),
    [
        ("recipe.lowrank.rank=300", "recipe.lowrank.rank is 300, wanted at most 256", "default.yaml"),
        ("recipe.lowrank.rank=true", "recipe.lowrank.rank is true, wanted a number", "default.yaml"),
        ("recipe.lowrank.rank=1.5", "recipe.lowrank.rank is 1.5, wanted a whole number", "default.yaml"),
        ("recipe.lowrank.rank=null", "recipe.lowrank.rank is null, wanted a whole number", "default.yaml"),
        ("recipe.lowrank=5", "recipe.lowrank is 5, wanted a mapping of keys", "default.yaml"),
        ("recipe.lowrnak.rank=1", "no key recipe.lowrnak, did you mean lowrank?", "keys of recipe are group_size"),
        ("recipe.gptq.damp=.inf", "recipe.gptq.damp is inf, wanted a finite number", "default.yaml"),
        ("recipe.gptq.damp=true", "recipe.gptq.damp is true, wanted a number", "default.yaml"),
        ("recipe.gptq.enabled=perhaps", "recipe.gptq.enabled is 'perhaps', wanted true or false", "default.yaml"),
        ("recipe.gptq.block_size=100", "wanted a multiple of 64", "default.yaml"),
        ("recipe.weights.scale=serach", "is 'serach', wanted absmax or search", "default.yaml"),
        ("recipe.skip=lm_head", "recipe.skip is 'lm_head', wanted a list", "default.yaml"),
        ("recipes=1", "no key recipes, did you mean recipe?", "the keys are calibrate, recipe, verify"),
        ("recipe.skip=[", "is not a value", "YAML"),
    ],
)
def test_wrong_keys_and_values(run: Run, tmp_path: Path, assignment: str, said: str, hint: str) -> None:
    ran = run("quantize", "model", "--out", tmp_path / "out", "--set", assignment)
    ran.failed(2, said)
    assert hint in hint_of(ran)
    assert "Extra inputs" not in ran.stderr
    assert "Input should" not in ran.stderr


def test_a_number_in_scientific_notation_is_a_number(run: Run, qwen3: Path) -> None:
    ran = run("quantize", qwen3, "--dry-run", "--json", "--set", "recipe.gptq.damp=1e-2")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["recipe"]["gptq"]["damp"] == 0.01


def test_an_unknown_key_of_an_override_names_those_there_are(run: Run, tmp_path: Path) -> None:
    ran = run("quantize", "model", "--out", tmp_path / "out", "--override", "*:act_bit=8")
    ran.failed(2, "act_bit", "did you mean act_bits?")
    assert re.search(r"pattern, act_bits, act_clip, rank, rotation", hint_of(ran))


def test_a_negative_seed(run: Run, tmp_path: Path) -> None:
    ran = run("calibrate", "model", "--out", tmp_path / "out", "--seed", -1)
    ran.failed(2, "calibrate.seed is -1, wanted at least 0")
    assert hint_of(ran)


@pytest.mark.parametrize("pattern", ["re:([", "re:(", "re:a{99999999999}", "re:"])
def test_patterns_that_are_no_expressions(run: Run, qwen3: Path, tmp_path: Path, pattern: str) -> None:
    ran = run("quantize", qwen3, "--config", "rtn", "--out", tmp_path / "out", "--skip", pattern)
    assert "glob" in hint_of(ran)


def test_skipping_everything_is_about_skip(run: Run, qwen3: Path, tmp_path: Path) -> None:
    ran = run("quantize", qwen3, "--config", "rtn", "--out", tmp_path / "out", "--skip", "*")
    ran.failed(2, f"--skip '*' takes out all {7 * LAYERS}")
    assert "--skip" in hint_of(ran)
    assert "--include" not in ran.stderr


def test_widths_that_64_does_not_divide_are_skipped_by_one_pattern(run: Run, tmp_path: Path) -> None:
    odd = save_model(tmp_path / "odd", intermediate_size=200)
    hint = hint_of(run("quantize", odd, "--dry-run", "--config", "rtn"))
    (pattern,) = re.findall(r"--skip '([^']+)'", hint)
    assert pattern == "*.mlp.down_proj"
    assert run("quantize", odd, "--dry-run", "--config", "rtn", "--skip", pattern).code == 0


def test_a_rank_beyond_the_smaller_side_is_said_in_the_plan(run: Run, qwen3: Path) -> None:
    command = ("quantize", qwen3, "--dry-run", "--config", "rtn", "--set", "recipe.lowrank.rank=128")
    ran = run(*command)
    assert ran.code == 0, ran.stderr
    (warning,) = [line for line in ran.stderr.splitlines() if line.startswith("warning: ")]
    assert "rank 128 is more than" in warning
    assert "k_proj" in warning
    (flag,) = re.findall(r"--override '([^']+)'", ran.stderr)
    assert flag.endswith(":rank=64")
    assert json.loads(run(*command, "--json").stdout)["warnings"] == [warning.removeprefix("warning: ")]
    fits = run("quantize", qwen3, "--dry-run", "--config", "rtn", "--set", "recipe.lowrank.rank=64")
    assert "warning" not in fits.stderr


@pytest.mark.parametrize("verb", ["calibrate", "quantize", "verify", "bench"])
def test_an_unknown_dtype(run: Run, qwen3: Path, checkpoint: Path, tmp_path: Path, verb: str) -> None:
    commands: dict[str, tuple[Any, ...]] = {
        "calibrate": (qwen3, "--out", tmp_path / "out", *CALIBRATE),
        "quantize": (qwen3, "--dry-run"),
        "verify": (checkpoint, "--model", qwen3),
        "bench": ("--shapes", "1x64x64"),
    }
    ran = run(verb, *commands[verb], "--dtype", "foo")
    ran.failed(2, "foo")
    assert "bfloat16" in hint_of(ran)


def test_shapes_off_the_group(run: Run) -> None:
    assert "--shapes 1x100x128" in hint_of(run("bench", "--shapes", "1x100x100"))


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"\xff" * 64])
def test_inspecting_what_is_not_there_or_is_garbage(run: Run, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "nope.safetensors"
    if content is not None:
        file.write_bytes(content)
    for path in (file, tmp_path / "folder"):
        assert hint_of(run("inspect", path))
    run("inspect", tmp_path / "folder").failed(2, f"no file or folder '{tmp_path / 'folder'}'")


def test_inspecting_a_folder_that_holds_weights_alone(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """As `omniw4 export` leaves them: the hint names what can be inspected."""
    weights = tmp_path / "w4a4_checkpoint.safetensors"
    shutil.copy(checkpoint / "model.safetensors", weights)
    ran = run("inspect", tmp_path)
    ran.failed(2)
    assert hint_of(ran).endswith(str(weights))
    assert run("inspect", weights).code == 0
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert str(weights) in hint_of(run("inspect", tmp_path))
    shutil.copy(checkpoint / "omniw4.json", tmp_path)
    assert str(weights) not in hint_of(run("inspect", tmp_path)), "a checkpoint whose weights have another name"


def test_the_output_inside_a_file(run: Run, qwen3: Path, tmp_path: Path) -> None:
    for verb, options in (("quantize", ("--config", "rtn")), ("calibrate", CALIBRATE)):
        ran = run(verb, qwen3, "--out", "/etc/passwd/x", *options)
        ran.failed(2, "/etc/passwd/x")
        assert "is a file" in hint_of(ran)


def test_a_garbage_gguf_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF" + b"\x00" * 60)
    for verb in ("calibrate", "quantize"):
        hint = hint_of(run(verb, file, "--out", tmp_path / "out"))
        assert "trust-remote-code" not in hint
        assert "copy the file again" in hint


def test_code_that_a_model_brings_is_allowed_by_its_flag(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    mystery = {"model_type": "mystery9", "architectures": ["MysteryForCausalLM"]}
    for extra, word in ({}, "newer transformers"), ({"auto_map": {"AutoConfig": "m.C"}}, "--trust-remote-code"):
        (folder / "config.json").write_text(json.dumps({**config, **mystery, **extra}))
        assert word in hint_of(run("quantize", folder, "--out", tmp_path / "out"))


def test_failed_gates_say_what_to_do(run: Run, checkpoint: Path, qwen3: Path, text: Path, tmp_path: Path) -> None:
    command = ("--model", qwen3, "--dataset", text, "--windows", 1, "--seq-len", 64, "--layer-tokens", 0)
    assert "act_bits=8" in hint_of(run("verify", checkpoint, *command, "--max-kl", 0), 1)
    other = save_model(tmp_path / "other", seed=1)
    ran = run("verify", checkpoint, "--model", other, *command[2:])
    ran.failed(1, "source_model", "tiny-qwen3")
    assert "--model" in hint_of(ran, 1)
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"x")
    assert "omniw4 quantize" in hint_of(run("verify", damaged, *command), 1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("calibrate", "model", "--out", "o", "--samples", "abc"), "'--samples': wanted a whole number"),
        (("verify", "dir", "--model", "m", "--max-kl", "abc"), "'--max-kl': wanted a number"),
        (("verify", "dir", "--model", "m", "--layer-tokens", -1), "'--layer-tokens': wanted at least 0"),
        (("bench", "--repetitions", 0), "'--repetitions': wanted at least 1"),
    ],
)
def test_values_of_options(run: Run, command: tuple[Any, ...], said: str) -> None:
    ran = run(*command)
    ran.failed(2, said)
    assert "Input should" not in ran.stderr
    assert "--help" in hint_of(ran)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("quantize", "MODEL", "--dry-run", "--device", "meta"), ["meta", "cuda"]),
        (("bench", "--what", "quantize", "--model", "MODEL", "--workdir", "/proc/none"), ["/proc/none"]),
        (("bench", "--model", "/no/such", "--shapes", "1x64x64"), ["/no/such"]),
        (("calibrate", "MODEL", "--out", "out", "--dataset", ""), ["empty"]),
        (("inspect", __file__), [".safetensors", "checkpoint folder"]),
    ],
)
def test_what_no_verb_can_use(run: Run, qwen3: Path, command: tuple[str, ...], words: list[str]) -> None:
    ran = run(*(qwen3 if part == "MODEL" else part for part in command))
    ran.failed(2, *words)
    assert hint_of(ran)
    assert "1x64x64" not in ran.stderr, "nothing was timed before"


def test_sequences_longer_than_the_models_positions(run: Run, qwen3: Path, checkpoint: Path, text: Path) -> None:
    for verb, options in (("calibrate", ("--out", "out")), ("verify", (checkpoint, "--model"))):
        ran = run(verb, *options, qwen3, "--dataset", text, "--seq-len", 257)
        ran.failed(2, "257 tokens", "256 positions")
        assert "--seq-len 256" in hint_of(ran)
    assert not Path("out").exists()


def test_weights_that_are_not_finite_are_refused_before_the_first_linear(
    run: Run, qwen3: Path, stats: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(qwen3, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.mlp.up_proj.weight"][1, 2:4] = float("nan")
    weights["model.layers.0.self_attn.o_proj.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for options in (("--dry-run",), ("--out", tmp_path / "out")):
        ran = run("quantize", folder, "--config", "rtn", *options)
        ran.failed(2, f"{LAYERS + 1} linears", "up_proj (2 values)", "o_proj (1 values)")
        assert "quantizing" not in ran.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    skips = re.findall(r"--skip '([^']+)'", hint_of(ran))
    assert "*.mlp.up_proj" in skips
    flags = [part for pattern in skips for part in ("--skip", pattern)]
    assert run("quantize", folder, "--config", "rtn", "--out", tmp_path / "fine", "--quiet", *flags).code == 0


def test_a_model_of_other_layers_than_linears_is_refused_before_it_is_loaded(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from omniw4 import model as models

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=384, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(models, "load", load)
    for verb, options in (("calibrate", ("--dataset", text, *CALIBRATE)), ("quantize", ("--config", "rtn"))):
        ran = run(verb, tmp_path / "model", "--out", tmp_path / "out", *options)
        ran.failed(2, "GPT2LMHeadModel", "nn.Linear", "Conv1D")
        assert hint_of(ran)


@pytest.mark.parametrize("verb", ["calibrate", "quantize"])
def test_a_locked_output_is_refused_before_the_model_is_read(
    run: Run, qwen3: Path, text: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omniw4 import model as models

    partial = tmp_path / "out.partial"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def skeleton(*_: Any, **__: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(models, "skeleton", skeleton)
    options: tuple[Any, ...] = ("--dataset", text, *CALIBRATE) if verb == "calibrate" else ("--config", "rtn")
    try:
        ran = run(verb, qwen3, "--out", tmp_path / "out", *options)
    finally:
        os.close(lock)
    ran.failed(2, "another process")
    assert "--out" in hint_of(ran)
    assert partial.is_dir(), "the other process still needs it"
