"""Hidden states of an OmniVoice at work: what its backbone sees while it decodes prompts.

Activations change as codes are unmasked, so rows are taken from every step of decoding, of the conditional and of the
unconditional half alike. Which rows are kept is drawn before decoding; memory holds these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from omniw4.calibrate.dataset import ADVISED_TOKENS, MIN_TOKENS
from omniw4.calibrate.prompts import FORMAT, PromptSet, SpeechPrompt
from omniw4.calibrate.sources import HiddenSource
from omniw4.errors import DatasetError, ModelError
from omniw4.model import LoadedModel
from omniw4.model.omnivoice import import_omnivoice

NUM_STEP = 32
FRAME_RATE = 25  # of the Higgs audio tokenizer, where the codec does not say

OnPrompt = Callable[[int, int, str], None]


def capture_decoding(
    loaded: LoadedModel,
    prompts: PromptSet,
    *,
    tokens: int,
    seed: int = 0,
    num_step: int = NUM_STEP,
    on_prompt: OnPrompt | None = None,
    **settings: Any,
) -> HiddenSource:
    """Decode every prompt with the package, and keep rows of what goes into the backbone.

    Args:
        loaded: an OmniVoice, with its tokenizer.
        tokens: how many to keep at most, in whole rows drawn from all steps of all prompts.
        seed: of the draw, and of the noise in decoding.
        settings: of ``OmniVoiceGenerationConfig``; the package's defaults otherwise.
        on_prompt: called with (done, total, text) after each prompt.

    Raises:
        ModelError: the model is no OmniVoice.
        DatasetError: a reference that cannot be encoded, or codes that are not of the model.
    """
    package = import_omnivoice()
    tasks = decoding_tasks(loaded, prompts)
    model: Any = loaded.model
    config = package.OmniVoiceGenerationConfig(num_step=num_step, **settings)
    lengths = [row_lengths(model, task) for task in tasks]
    kept = _draw(lengths, num_step, tokens, seed)
    rows: list[torch.Tensor] = []
    torch.manual_seed(seed)
    for number, task in enumerate(tasks):
        with _keeping_rows(model.llm, lengths[number], kept[number], rows), torch.inference_mode():
            model._generate_iterative(task, config)
        if on_prompt is not None:
            on_prompt(number + 1, len(tasks), task.texts[0])
    return _source(rows, prompts, num_step, sum(sum(pair) for pair in lengths) * num_step)


def decoding_tasks(loaded: LoadedModel, prompts: PromptSet) -> list[Any]:
    """A ``GenerationTask`` of the package for each prompt. Gives the model its tokenizer and, if needed, its codec."""
    package = import_omnivoice()
    from omnivoice.utils.duration import RuleDurationEstimator

    model: Any = loaded.model
    if not isinstance(model, package.OmniVoice):
        raise ModelError(
            f"model {loaded.source!r} is a {type(model).__name__}, prompts are for an OmniVoice",
            hint="calibrate other models on text, with --dataset",
        )
    if loaded.tokenizer is None:
        raise ModelError(f"model {loaded.source!r} has no tokenizer", hint="copy that of OmniVoice into its folder")
    model.text_tokenizer = loaded.tokenizer
    model.duration_estimator = RuleDurationEstimator()
    if any(prompt.ref_audio for prompt in prompts.prompts) and model.audio_tokenizer is None:
        _load_codec(loaded)
    return [_task(package, model, prompt) for prompt in prompts.prompts]


def row_lengths(model: Any, task: Any) -> tuple[int, int]:
    """Tokens of the conditional and of the unconditional row of a task of one prompt."""
    inputs = model._prepare_inference_inputs(
        task.texts[0], task.target_lens[0], task.ref_texts[0], task.ref_audio_tokens[0], task.langs[0],
        task.instructs[0],
    )  # fmt: skip
    return inputs["input_ids"].shape[2], task.target_lens[0]


def _draw(lengths: Sequence[tuple[int, int]], num_step: int, tokens: int, seed: int) -> list[set[tuple[int, int]]]:
    """Rows to keep, as (step, half), of each prompt: drawn from all of them until there are ``tokens``."""
    rows = [(number, step, half) for number in range(len(lengths)) for step in range(num_step) for half in (0, 1)]
    kept: list[set[tuple[int, int]]] = [set() for _ in lengths]
    left = tokens
    for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist():
        number, step, half = rows[index]
        if left >= lengths[number][half]:
            kept[number].add((step, half))
            left -= lengths[number][half]
    return kept


@contextmanager
def _keeping_rows(
    backbone: nn.Module, lengths: tuple[int, int], kept: set[tuple[int, int]], rows: list[torch.Tensor]
) -> Iterator[None]:
    """Append rows of ``inputs_embeds`` of the backbone's calls, one a step, without their padding."""
    step = -1

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal step
        step += 1
        rows.extend(
            kwargs["inputs_embeds"][half, : lengths[half]].to("cpu", copy=True)
            for half in (0, 1)
            if (step, half) in kept
        )

    handle = backbone.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _source(rows: list[torch.Tensor], prompts: PromptSet, num_step: int, seen: int) -> HiddenSource:
    counted = sum(len(row) for row in rows)
    if counted < MIN_TOKENS:
        raise DatasetError(
            f"prompts {prompts.name!r} gave {counted} tokens, wanted at least {MIN_TOKENS}",
            hint="raise --samples or --seq-len: their product bounds the tokens kept",
        )
    hidden = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [S, L, H]
    mask = torch.arange(hidden.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    advised = f"calibration on {counted} tokens, advised are at least {ADVISED_TOKENS}"
    fingerprint = {
        "dataset": prompts.name,
        "source_sha256": prompts.sha256,
        "tokens": counted,
        "samples": len(rows),
        "seq_len": hidden.shape[1],
        "bos": {"policy": "source", "token": None},
        "prompts": len(prompts.prompts),
        "num_step": num_step,
        "tokens_seen": seen,
    }
    warnings = [advised] if counted < ADVISED_TOKENS else []
    return HiddenSource(hidden, mask, bidirectional=True, fingerprint=fingerprint, warnings=warnings)


def _task(package: Any, model: Any, prompt: SpeechPrompt) -> Any:
    ref_text, codes = prompt.ref_text, prompt.ref_codes
    if codes is not None:
        _check_codes(codes, model.config, prompt)
    elif prompt.ref_audio is not None:
        voice = model.create_voice_clone_prompt(str(prompt.ref_audio), prompt.ref_text)
        ref_text, codes = voice.ref_text, voice.ref_audio_tokens
    if codes is None:
        ref_text = None
    return package.GenerationTask(
        batch_size=1,
        texts=[prompt.text],
        target_lens=[_target(model, prompt, ref_text, codes)],
        langs=[package._resolve_language(prompt.language)],
        instructs=[package._resolve_instruct(prompt.instruct, use_zh=bool(package._ZH_RE.search(prompt.text)))],
        ref_texts=[ref_text],
        ref_audio_tokens=[None if codes is None else codes.to(model.device)],
        ref_rms=[None],
    )


def _target(model: Any, prompt: SpeechPrompt, ref_text: str | None, codes: torch.Tensor | None) -> int:
    """Frames to decode."""
    if prompt.duration is None:
        return int(model._estimate_target_tokens(prompt.text, ref_text, None if codes is None else codes.shape[1]))
    codec = getattr(model.audio_tokenizer, "config", None)
    return max(1, int(prompt.duration * getattr(codec, "frame_rate", FRAME_RATE)))


def _check_codes(codes: torch.Tensor, config: Any, prompt: SpeechPrompt) -> None:
    codebooks, size = config.num_audio_codebook, config.audio_vocab_size
    if codes.shape[0] != codebooks or int(codes.min()) < 0 or int(codes.max()) >= size:
        found = f"{codes.shape[0]} codebooks with codes of {int(codes.min())} to {int(codes.max())}"
        raise DatasetError(
            f"ref_codes of prompt {prompt.text[:40]!r} have {found}, the model has {codebooks} of 0 to {size - 1}",
            hint=FORMAT,
        )


def _load_codec(loaded: LoadedModel) -> None:
    from transformers import AutoFeatureExtractor, HiggsAudioV2TokenizerModel

    folder = None if loaded.folder is None else loaded.folder / "audio_tokenizer"
    if folder is None or not folder.is_dir():
        raise DatasetError(
            f"a prompt has ref_audio, and model {loaded.source!r} has no codec in audio_tokenizer/ to encode it",
            hint="copy the codec there, or give ref_codes",
        )
    model: Any = loaded.model
    model.audio_tokenizer = HiggsAudioV2TokenizerModel.from_pretrained(folder).to(model.device).eval()
    model.feature_extractor = AutoFeatureExtractor.from_pretrained(folder)
    model.sampling_rate = model.feature_extractor.sampling_rate
