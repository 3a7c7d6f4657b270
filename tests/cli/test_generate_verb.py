"""``omniw4 generate``: a model's own text, whole or not at all, for the verbs that read one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CALIBRATE, Run, save_model
from test_interruption import start

from omnivoice_fixture import require_omnivoice

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "omnivoice"
SMALL = ("--samples", 4, "--seq-len", 32)


@pytest.fixture(scope="module")
def own(run: Run, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "own.jsonl"
    ran = run("generate", qwen3, "--out", out, *SMALL)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith(f"Wrote {out} · 4 texts · 124 tokens · ")
    assert "writing 124/124  token 32 of sequences 1 to 4\n" in ran.stderr
    return out


def test_a_text_a_line(own: Path) -> None:
    lines = [json.loads(line) for line in own.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [list(line) for line in lines] == [["text"]] * 4
    assert all(0 < len(line["text"]) <= 31 and "<end>" not in line["text"] for line in lines)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ((), True),
        (("--batch-size", 1), True),
        (("--batch-size", 3), True),
        (("--seed", 0, "--temperature", 1), True),
        (("--seed", 1), False),
        (("--temperature", 0.5), False),
    ],
)
def test_what_decides_the_bytes(run: Run, qwen3: Path, own: Path, tmp_path: Path, options: Any, same: bool) -> None:
    out = tmp_path / "deep" / "er" / "own.jsonl"
    ran = run("generate", qwen3, "--out", out, *SMALL, *options, "--quiet")
    assert (ran.code, ran.stderr) == (0, "")
    assert (out.read_bytes() == own.read_bytes()) is same
    assert [p.name for p in out.parent.iterdir()] == ["own.jsonl"]


def test_fewer_samples_are_the_first_of_more(run: Run, qwen3: Path, own: Path, tmp_path: Path) -> None:
    assert run("generate", qwen3, "--out", tmp_path / "own.jsonl", "--samples", 2, "--seq-len", 32).code == 0
    assert (tmp_path / "own.jsonl").read_bytes().splitlines() == own.read_bytes().splitlines()[:2]


def test_another_beginning(run: Run, qwen3: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    ran = run("generate", qwen3, "--out", out, *SMALL, "--begin", "a", "--json")
    assert ran.code == 0
    document = json.loads(ran.stdout)
    assert document["begin"] == "a"
    assert document["begin_id"] != 0
    assert out.read_bytes() != own.read_bytes()
    ran = run("generate", qwen3, "--out", tmp_path / "none.jsonl", *SMALL, "--begin", "no such token")
    assert ran.code != 0
    assert "no token 'no such token'" in ran.stderr
    assert not (tmp_path / "none.jsonl").exists()


def test_the_document(run: Run, qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    ran = run("generate", qwen3, "--out", out, *SMALL, "--seed", 5, "--temperature", 0.9, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    document = json.loads(ran.stdout)
    name = document.pop("model")
    assert (name["name"], len(name["hash"])) == (qwen3.name, 64)
    expected = {"texts": 4, "empty": 0, "tokens": 124, "samples": 4, "seq_len": 32, "warnings": []}
    assert (document.pop("begin"), document.pop("begin_id")) == ("<end>", 0)
    assert document == {"out": str(out), "seed": 5, "temperature": 0.9, **expected}


def test_a_model_calibrates_and_distils_on_its_own_text(run: Run, qwen3: Path, tmp_path: Path) -> None:
    own, stats, out = tmp_path / "own.jsonl", tmp_path / "stats", tmp_path / "out"
    assert run("generate", qwen3, "--out", own, "--samples", 16, "--seq-len", 64).code == 0
    ran = run("calibrate", qwen3, "--dataset", own, "--out", stats, *CALIBRATE, "--json")
    assert ran.code == 0, ran.stderr
    data = json.loads(ran.stdout)["fingerprint"]["data"]
    assert (data["dataset"], data["tokens"]) == ("own.jsonl", 4 * 64)
    distil = [
        f"recipe.distill.{key}"
        for key in ("seq_len=64", "samples=4", "held_out=2", "batch_size=2", "micro_batch=2", "eval_every=1")
    ]
    command = ("quantize", qwen3, "--stats", stats, "--out", out, "--distill-dataset", own, "--distill-steps", 2)
    ran = run(*command, *(word for key in distil for word in ("--set", key)), "--set", "recipe.lowrank.rank=8")
    assert ran.code == 0, ran.stderr
    assert "distilling 21 linears on 'own.jsonl': 4 sequences to train on, 1 held out" in ran.stderr
    assert run("inspect", out, "--hashes").code == 0


def refused(run: Run, tmp_path: Path, model: Path, *words: str, options: tuple[Any, ...] = SMALL) -> None:
    """One sentence and a hint, before any sampling, and nothing written."""
    ran = run("generate", model, "--out", tmp_path / "new" / "own.jsonl", *options)
    ran.failed(2, *words, "\n\nhint: ")
    assert (ran.stdout, "writing" in ran.stderr) == ("", False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--samples", 0), ["--samples", "wanted at least 1"]),
        (("--seq-len", 7), ["--seq-len", "wanted at least 8"]),
        (("--seq-len", 257), ["257 tokens are longer than the 256 positions", "--seq-len 256"]),
        (("--batch-size", 0), ["--batch-size", "wanted at least 1"]),
        (("--seed", -1), ["--seed", "wanted at least 0"]),
        (("--temperature", 0), ["--temperature is 0, wanted a finite number above 0"]),
        (("--temperature", -1), ["--temperature is -1"]),
        (("--temperature", "nan"), ["--temperature is nan"]),
        (("--temperature", "inf"), ["--temperature is inf"]),
        (("--dtype", "float7"), ["float7"]),
        (("--device", "toaster"), ["toaster"]),
        (("--gguf-file", "q.gguf"), ["q.gguf", "--gguf-file"]),
    ],
)
def test_wrong_options(run: Run, qwen3: Path, tmp_path: Path, options: tuple[Any, ...], words: list[str]) -> None:
    refused(run, tmp_path, qwen3, *words, options=options)


def test_a_missing_model(run: Run, tmp_path: Path) -> None:
    refused(run, tmp_path, tmp_path / "missing", "missing")


def test_a_quantized_model_does_not_write(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    refused(run, tmp_path, checkpoint, "already quantized")


def test_a_bare_backbone(run: Run, qwen3: Path, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "backbone"
    transformers.AutoModel.from_pretrained(qwen3).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(qwen3).save_pretrained(folder)
    refused(run, tmp_path, folder, "is a Qwen3Model, which writes no text from left to right", "--dataset")


def test_an_omnivoice(run: Run, tmp_path: Path) -> None:
    require_omnivoice()
    refused(run, tmp_path, FIXTURE, "is a OmniVoice, which writes no text from left to right", "--prompts")


def test_a_model_without_a_tokenizer(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(run, tmp_path, folder, "has no tokenizer")


def test_a_tokenizer_without_bos_and_eos(run: Run, qwen3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(run, tmp_path, folder, "neither a BOS nor an EOS token")


def test_weights_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "new" / "own.jsonl"
    run("generate", folder, "--out", out, *SMALL).failed(2, "gives NaN or inf for the next token", "\n\nhint: ")
    assert not out.parent.exists()


def test_an_existing_file_is_kept_or_replaced_whole(run: Run, qwen3: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    out.write_text("years of work")
    ran = run("generate", qwen3, "--out", out, *SMALL)
    ran.failed(2, "exists", "--overwrite")
    assert "writing" not in ran.stderr
    assert out.read_text() == "years of work"
    assert run("generate", qwen3, "--out", out, *SMALL, "--overwrite").code == 0
    assert out.read_bytes() == own.read_bytes()


def test_what_is_no_file_is_never_replaced(run: Run, qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").mkdir()
    (tmp_path / "pipe.jsonl").symlink_to("/dev/null")
    for name in ("own.jsonl", "pipe.jsonl"):
        run("generate", qwen3, "--out", tmp_path / name, *SMALL, "--overwrite").failed(2, "is no file", "\n\nhint: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own.jsonl", "pipe.jsonl"]


def test_a_name_of_another_kind(run: Run, qwen3: Path, tmp_path: Path) -> None:
    for name in ("own.txt", "own"):
        run("generate", qwen3, "--out", tmp_path / name, *SMALL).failed(2, name, "own.jsonl", "\n\nhint: ")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(run: Run, qwen3: Path, tmp_path: Path) -> None:
    """/proc refuses new files to everyone, root included; a file holds no other."""
    (tmp_path / "file").write_text("x")
    for folder in ("/proc", "/proc/deep", tmp_path / "file"):
        ran = run("generate", qwen3, "--out", f"{folder}/own.jsonl", *SMALL)
        ran.failed(2, f"cannot write '{folder}/own.jsonl'", "\n\nhint: ")
        assert "writing" not in ran.stderr, "found before the work"


def test_a_full_disk_keeps_the_old_file(run_process: Run, qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    out.write_text("old")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))

    ran = run_process("generate", qwen3, "--out", out, *SMALL, "--overwrite", preexec_fn=small_disk)
    ran.failed(2, "cannot write", "\n\nhint: ")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("own.jsonl", "old")]


def test_empty_texts_are_told(run: Run, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniw4.calibrate import own_text

    rows = torch.tensor([[0, 0, 0], [0, 66, 67], [0, 0, 0], [0, 68, 0]])
    monkeypatch.setattr(own_text, "sample_tokens", lambda *_, **__: rows)
    out = tmp_path / "own.jsonl"
    ran = run("generate", qwen3, "--out", out, *SMALL, "--quiet")
    assert ran.code == 0
    assert ran.stderr == "warning: 2 of 4 texts are empty and were left out\n"
    assert len(out.read_text().splitlines()) == 2
    document = json.loads(run("generate", qwen3, "--out", out, *SMALL, "--overwrite", "--json").stdout)
    assert (document["texts"], document["empty"]) == (2, 2)
    assert document["warnings"] == ["2 of 4 texts are empty and were left out"]
    rows.zero_()
    run("generate", qwen3, "--out", tmp_path / "none.jsonl", *SMALL).failed(2, "all 4 texts", "\n\nhint: ")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_second_process_is_refused_at_once(run: Run, qwen3: Path, own: Path, tmp_path: Path) -> None:
    """While the first lives, even stopped; the moment it is dead the next goes on, and sweeps what it left."""
    out = tmp_path / "own.jsonl"
    process = start("generate", qwen3, "--out", out, "--samples", 5000, "--seq-len", 256)
    assert process.stderr is not None
    while " writes " not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    for flags in ((), ("--overwrite",)):
        ran = run("generate", qwen3, "--out", out, *SMALL, *flags)
        ran.failed(2, "another process is writing", "own.jsonl", "\n\nhint: ")
        assert "writes" not in ran.stderr
    assert run("generate", qwen3, "--out", tmp_path / "other.jsonl", *SMALL).code == 0
    process.kill()
    process.communicate(timeout=60)
    (tmp_path / ".own.jsonl.0123abcd.omniw4-tmp").write_text("of a process that was killed while it wrote")
    (tmp_path / ".own.jsonl.bak.0123abcd.omniw4-tmp").write_text("of another name")
    assert run("generate", qwen3, "--out", out, *SMALL).code == 0
    assert out.read_bytes() == own.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"own.jsonl", "other.jsonl", ".own.jsonl.bak.0123abcd.omniw4-tmp"}


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(qwen3: Path, tmp_path: Path, with_signal: int) -> None:
    process = start("generate", qwen3, "--out", tmp_path / "new" / "own.jsonl", "--samples", 5000, "--seq-len", 256)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if " writes " in line:
            break
    assert (tmp_path / "new").is_dir()
    os.kill(process.pid, with_signal)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, said + rest
    assert "error: interrupted; nothing was written\n" in rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
