"""Prompts read from a file, and hidden states captured while the real package decodes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from omnivoice_fixture import random_model, require_omnivoice
from omniw4.calibrate.omnivoice import capture_decoding, decoding_tasks
from omniw4.calibrate.prompts import PromptSet, SpeechPrompt, read_prompts
from omniw4.errors import DatasetError, ModelError
from omniw4.model import LoadedModel
from problems import assert_same
from tiny_models import qwen3

STEPS = 4
REFERENCE = torch.randint(0, 1024, (8, 9), generator=torch.Generator().manual_seed(0))
PROMPTS = PromptSet(
    [
        SpeechPrompt("Hello there, all of you.", duration=0.64, language="en"),
        SpeechPrompt("And again.", duration=0.4, ref_text="A voice.", ref_codes=REFERENCE),
    ],
    "prompts.jsonl",
    "0" * 64,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    require_omnivoice()
    model = random_model()
    return LoadedModel(model, model.text_tokenizer, "tiny", "hash")


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_prompts_are_read(tmp_path: Path) -> None:
    (tmp_path / "voice.wav").write_bytes(b"")
    path = write(
        tmp_path,
        {"text": "One.", "duration": 1.5, "language": "en"},
        "",
        {"text": "Two.", "ref_text": "Ref.", "ref_codes": REFERENCE.tolist()},
        {"text": "Three.", "ref_text": "Ref.", "ref_audio": "voice.wav", "instruct": None},
    )
    found = read_prompts(path)
    assert found.name == "prompts.jsonl"
    assert [p.text for p in found.prompts] == ["One.", "Two.", "Three."]
    assert found.prompts[0].duration == 1.5
    assert torch.equal(found.prompts[1].ref_codes, REFERENCE)  # type: ignore[arg-type]
    assert found.prompts[2].ref_audio == tmp_path / "voice.wav"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 of prompts 'prompts.jsonl' is not JSON"),
        ("[" * 100_000, "line 2 of prompts 'prompts.jsonl' is not JSON"),
        ([1], "line 2 of prompts 'prompts.jsonl' has no text"),
        ({"text": " "}, "has no text"),
        ({"text": "x", "voice": "y"}, "unknown key 'voice'"),
        ({"text": "x", "language": 3}, "language is 3, wanted text"),
        ({"text": "x", "duration": -1}, "duration is -1, wanted seconds above 0"),
        ({"text": "x", "duration": True}, "duration is True"),
        ({"text": "x", "ref_text": "r", "ref_audio": "no.wav"}, "ref_audio 'no.wav' does not exist"),
        ({"text": "x", "ref_codes": [[1]]}, "a reference without ref_text"),
        ({"text": "x", "ref_text": "r", "ref_codes": [[1], [1, 2]]}, "rows of integers of one length"),
        ({"text": "x", "ref_text": "r", "ref_codes": [[0.5]]}, "ref_codes are torch.float32"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        read_prompts(write(tmp_path, {"text": "fine"}, line))


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is empty"):
        read_prompts(write(tmp_path, "", " "))
    with pytest.raises(DatasetError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")


def test_prompts_that_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/zero", tmp_path / "pipe.jsonl"):
        with pytest.raises(DatasetError, match="no regular file"):
            read_prompts(path)


def test_prompts_as_other_programs_write_them(tmp_path: Path) -> None:
    """With a byte order mark, carriage returns, and separators of lines that JSON leaves as they are."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"text": "one\u2028two\x85"}\r\n\r\n{"text": "three"}\r\n'.encode())
    assert [prompt.text for prompt in read_prompts(path).prompts] == ["one\u2028two\x85", "three"]


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "cut \\ud83d"}')
    with pytest.raises(DatasetError, match=r"text in line 1 of prompts 'prompts\.jsonl' holds half a character"):
        read_prompts(path)


def test_all_rows_are_what_the_backbone_was_given(loaded: LoadedModel) -> None:
    seen: list[torch.Tensor] = []
    handle = loaded.model.llm.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"].clone()), with_kwargs=True
    )
    told: list[str] = []
    source = capture_decoding(
        loaded,
        PROMPTS,
        tokens=10**6,
        num_step=STEPS,
        on_prompt=lambda done, total, text: told.append(f"{done}/{total}"),
    )
    handle.remove()
    assert told == ["1/2", "2/2"]
    assert len(seen) == 2 * STEPS
    assert len(source) == 2 * STEPS * 2, "a conditional and an unconditional row of every step"
    for number, padded in enumerate(seen):
        for half, target in ((0, padded.shape[1]), (1, (16, 10)[number // STEPS])):
            row = source.hidden_states[2 * number + half][source.mask[2 * number + half]]
            assert_same(row, padded[half, :target], f"step {number}, half {half}")
    assert source.bidirectional
    assert source.fingerprint["tokens"] == source.fingerprint["tokens_seen"] == int(source.mask.sum())
    assert (source.fingerprint["prompts"], source.fingerprint["num_step"]) == (2, STEPS)
    assert "advised" in source.warnings[0]
    changed = source.hidden_states[0] != source.hidden_states[2]
    assert changed.any(), "codes are unmasked from step to step"


def test_rows_are_drawn_up_to_a_number_of_tokens(loaded: LoadedModel) -> None:
    whole = capture_decoding(loaded, PROMPTS, tokens=10**6, num_step=STEPS)
    part = capture_decoding(loaded, PROMPTS, tokens=300, num_step=STEPS)
    again = capture_decoding(loaded, PROMPTS, tokens=300, num_step=STEPS)
    assert 250 < part.fingerprint["tokens"] <= 300
    assert_same(again.hidden_states, part.hidden_states, "the same seed")
    rows = {tuple(row[mask].flatten().tolist()) for row, mask in zip(whole.hidden_states, whole.mask, strict=True)}
    assert all(tuple(r[m].flatten().tolist()) in rows for r, m in zip(part.hidden_states, part.mask, strict=True))
    other = capture_decoding(loaded, PROMPTS, tokens=300, num_step=STEPS, seed=1)
    assert other.hidden_states.shape != part.hidden_states.shape or not torch.equal(other.mask, part.mask)
    with pytest.raises(DatasetError, match="gave 0 tokens"):
        capture_decoding(loaded, PROMPTS, tokens=5, num_step=STEPS)


def test_durations_are_estimated_as_the_package_does(loaded: LoadedModel) -> None:
    prompts = PromptSet([SpeechPrompt("A text of some length, without a duration.")], "p", "0")
    (task,) = decoding_tasks(loaded, prompts)
    assert task.target_lens == [loaded.model._estimate_target_tokens(prompts.prompts[0].text, None, None)]  # type: ignore[operator]


def test_what_does_not_fit_is_refused(loaded: LoadedModel) -> None:
    codes = SpeechPrompt("x", ref_text="r", ref_codes=REFERENCE[:3])
    with pytest.raises(DatasetError, match=r"have 3 codebooks with codes of .*, the model has 8 of 0 to 1024"):
        decoding_tasks(loaded, PromptSet([codes], "p", "0"))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM, prompts are for an OmniVoice"):
        decoding_tasks(LoadedModel(qwen3(), None, "tiny", "hash"), PROMPTS)
