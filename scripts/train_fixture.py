"""Train the small OmniVoice of ``tests/fixtures/omnivoice``: the real architecture, on a language made from text.

A trained model has what random weights lack: outliers, confident predictions, heads that look for something. Real
speech tokens need a codec and recordings, so the codes here are made from text by a quantizer that is as simple as it
looks: a frame a character, its class in the first codebook, its context in the next ones, the speaker's offset, and
noise in the last ones, as in a residual codec the first codebooks say what and the last ones little. The text is
Python's own manual (``pydoc_data.topics``); its last tenth is held out.

Trained with the package's own loss, ``OmniVoice.forward(labels=...)``: a random share of the codes masked, some rows
with a reference of the same speaker, some without style and text, which guidance needs.

    python scripts/train_fixture.py tests/fixtures/omnivoice --seconds 100      # on a GPU
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omniw4.model.omnivoice import attach, byte_tokenizer, import_omnivoice, random_codec

CODES, CODEBOOKS, SPEAKERS = 64, 8, 4
BACKBONE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "tie_word_embeddings": True,
}
ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"()[]{}<>=+-*/_@#%&|"
FRAMES = range(32, 144, 16)  # lengths of an utterance, its reference included
PROMPTS = 24
RATIOS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Corpus:
    """A text as tensors, one entry a character."""

    text: str
    ids: torch.Tensor  # [n] int64, of the tokenizer
    codes: torch.Tensor  # [C, n] int64, of speaker 0 and without noise
    starts: torch.Tensor  # [w] int64, first characters of words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=95.0, help="training time; the learning rate follows it")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--evaluate", action="store_true", help="train nothing, judge what is in the folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    text = manual()
    cut = len(text) * 9 // 10
    train, held = corpus(text[:cut], chosen.device), corpus(text[cut:], chosen.device)
    package = import_omnivoice()
    record = chosen.out / "training.json"
    if chosen.evaluate:
        model = package.OmniVoice.from_pretrained(chosen.out, train=True, dtype=torch.float32).to(chosen.device)
        figures = json.loads(record.read_text(encoding="utf-8"))
    else:
        config = package.OmniVoiceConfig(llm_config=BACKBONE, audio_vocab_size=CODES + 1, audio_mask_id=CODES)
        model = package.OmniVoice(config).to(chosen.device)
        figures = {"seconds": chosen.seconds, "batch": chosen.batch}
        figures["steps"] = fit(model, train, chosen.seconds, chosen.batch)
        model = model.to(torch.bfloat16)
        model.save_pretrained(chosen.out)
        byte_tokenizer().save_pretrained(chosen.out)
    figures |= judge(model, train, held)
    print(json.dumps(figures, indent=1), flush=True)
    record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    with (chosen.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts(held, PROMPTS))


def manual() -> str:
    """The topics of Python's manual as one line of characters of the alphabet, single spaces between words."""
    from pydoc_data.topics import topics

    text = " ".join(topics[name] for name in sorted(topics))
    known = set(ALPHABET) | set(ALPHABET.upper())
    return " ".join("".join(c if c in known else " " for c in text).split())


def quantize(text: str) -> torch.Tensor:
    """Text to codes ``[C, n]``, of speaker 0 and without noise. Case does not matter."""
    sound = torch.tensor([ALPHABET.index(c) for c in text.lower()])
    space = torch.zeros(1, dtype=torch.int64)
    before, after = torch.cat([space, sound[:-1]]), torch.cat([sound[1:], space])
    prefix, place, so_far, index = [], [], 0, 0
    for code in sound.tolist():
        so_far, index = (0, 0) if code == 0 else (so_far * 31 + code, index + 1)
        prefix.append(so_far % 1009 % CODES)
        place.append(min(index, 15))
    bigram, ahead = (sound + 5 * before) % CODES, (3 * sound + 7 * after) % CODES
    rows = [sound % CODES, bigram, torch.tensor(prefix), ahead, sound % CODES, 4 * torch.tensor(place)]
    return torch.stack([*rows, (bigram + ahead) % CODES, sound % CODES])


def spoken(codes: torch.Tensor, speaker: torch.Tensor) -> torch.Tensor:
    """Codes ``[B, C, n]`` as speaker ``[B]`` says them, the last two codebooks with noise."""
    said = codes.clone()
    said[:, 4] = (said[:, 4] + 16 * speaker[:, None]) % CODES
    said[:, 5] += speaker[:, None]
    for codebook, share in ((6, 0.3), (7, 0.5)):
        noise = said[:, codebook] // 8 * 8 + torch.randint_like(said[:, codebook], 8)
        said[:, codebook] = torch.where(torch.rand(noise.shape, device=noise.device) < share, noise, said[:, codebook])
    return said


def corpus(text: str, device: str) -> Corpus:
    ids = torch.tensor(byte_tokenizer()(text).input_ids, device=device)
    assert len(ids) == len(text)
    starts = [i + 1 for i, c in enumerate(text[:-1]) if c == " "]
    return Corpus(text, ids, quantize(text).to(device), torch.tensor(starts, device=device))


def batch(data: Corpus, rows: int, frames: int, reference: int, ratio: float | None, *, text: bool) -> dict[str, Any]:
    """Inputs of ``OmniVoice.forward``: rows of the same length, the codes after the reference masked by a share.

    Args:
        reference: frames at the beginning that are given.
        ratio: share of masked codes; None: another one for every row.
        text: False leaves style, text and reference out.
    """
    device = data.ids.device
    usable = data.starts[data.starts < len(data.ids) - frames]
    begin = usable[torch.randint(len(usable), (rows,), device=device)]
    window = begin[:, None] + torch.arange(frames, device=device)  # [B, n]
    speaker = torch.randint(SPEAKERS, (rows,), device=device)
    codes = spoken(data.codes[:, window].transpose(0, 1), speaker)  # [B, C, n]
    share = torch.rand(rows, 1, 1, device=device) if ratio is None else ratio
    masked = torch.rand(codes.shape, device=device) < share
    masked[..., :reference] = False
    shown, labels = codes.masked_fill(masked, CODES), codes.masked_fill(~masked, -100)
    if text:
        head, tail = marks(reference > 0)
        ids = torch.cat([head.expand(rows, -1), data.ids[window].cpu(), tail.expand(rows, -1)], 1).to(device)
        ids = ids[:, None].expand(-1, CODEBOOKS, -1)
        shown, labels = torch.cat([ids, shown], 2), torch.cat([torch.full_like(ids, -100), labels], 2)
    else:
        shown, labels = shown[..., reference:], labels[..., reference:]
    length = shown.shape[2]
    audio = torch.ones(rows, length, dtype=torch.bool, device=device)
    audio[:, : length - (frames if text else length)] = False
    every = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).expand(rows, -1, -1, -1)
    return {"input_ids": shown, "audio_mask": audio, "labels": labels, "attention_mask": every}


def marks(reference: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids before and after the text, as the package writes them."""
    if reference not in _MARKS:
        style = "<|denoise|>" * reference + "<|lang_start|>en<|lang_end|><|instruct_start|>None<|instruct_end|>"
        tokenizer = byte_tokenizer()
        _MARKS[reference] = tuple(
            torch.tensor(tokenizer(t).input_ids) for t in (f"{style}<|text_start|>", "<|text_end|>")
        )
    return _MARKS[reference]


_MARKS: dict[bool, Any] = {}


def fit(model: Any, data: Corpus, seconds: float, rows: int) -> int:
    """Train for a time; the learning rate rises over its first fiftieth and falls as a cosine. Returns the steps."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=data.ids.is_cuda)
    device = data.ids.device.type
    choose = torch.Generator().manual_seed(1)
    start, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - start) / seconds) < 1:
        rate = 2e-3 * min(done * 50, 0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        frames = FRAMES[int(torch.randint(len(FRAMES), (), generator=choose))]
        kind = float(torch.rand((), generator=choose))  # a sixth unconditional, a third without a reference
        reference = 0 if kind < 0.5 else int(frames * 0.4 * torch.rand((), generator=choose)) + 4
        inputs = batch(data, rows, frames, reference, None, text=kind > 1 / 6)
        with torch.autocast(device, torch.bfloat16):
            loss = model(**inputs).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            print(f"{step:6d} {time.perf_counter() - start:6.1f} s  loss {float(loss):.3f}", flush=True)
        step += 1
    return step


@torch.no_grad()
def judge(model: Any, train: Corpus, held: Corpus) -> dict[str, Any]:
    """Accuracy on masked codes of the held-out text, of the model and of the commonest code of each codebook."""
    model.eval()
    torch.manual_seed(2)
    counts = torch.stack(
        [torch.bincount(row, minlength=CODES) for row in spoken(train.codes[None], train.ids[:1] * 0)[0]]
    )
    common = counts.argmax(1)
    figures: dict[str, Any] = {"masked_accuracy": {}, "unigram_accuracy": {}, "by_codebook": {}}
    for ratio in RATIOS:
        inputs = batch(held, 64, 96, 24, ratio, text=True)
        labels = inputs.pop("labels")
        right = model(**inputs).logits.argmax(-1) == labels
        masked = labels >= 0
        figures["masked_accuracy"][str(ratio)] = share(right, masked)
        figures["unigram_accuracy"][str(ratio)] = share(labels == common[None, :, None], masked)
        figures["by_codebook"][str(ratio)] = [share(right[:, c], masked[:, c]) for c in range(CODEBOOKS)]
    figures["generated"] = generated(model, held)
    return figures


def generated(model: Any, held: Corpus) -> dict[str, Any]:
    """Greedy decoding by the package: which share of the codes is what the quantizer makes of the text."""
    from omnivoice.models.omnivoice import GenerationTask, OmniVoiceGenerationConfig

    attach(model, random_codec(tiny=True).to(model.device))
    wanted = prompts(held, 8)
    references = [torch.tensor(p["ref_codes"], device=model.device) for p in wanted]
    lengths = [len(p["text"]) for p in wanted]
    task = GenerationTask(
        8, [p["text"] for p in wanted], lengths, ["en"] * 8, [None] * 8, [p["ref_text"] for p in wanted], references,
        [0.1] * 8,
    )  # fmt: skip
    codes = model._generate_iterative(task, OmniVoiceGenerationConfig(position_temperature=0.0))
    del model.audio_tokenizer
    hits = [(got.cpu()[:4] == quantize(p["text"])[:4]).float().mean(1) for got, p in zip(codes, wanted, strict=True)]
    return {"first_four_codebooks": [round(float(x), 4) for x in torch.stack(hits).mean(0)]}


def prompts(held: Corpus, count: int) -> list[dict[str, Any]]:
    """Held-out texts with a reference each, in the format of ``omniw4 calibrate --prompts``.

    Reference and text together are as long as the utterances of the training.
    """
    choose = torch.Generator().manual_seed(3)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        frames = FRAMES[int(torch.randint(2, len(FRAMES), (), generator=choose))]
        begin = int(held.starts[torch.randint(len(held.starts) - 200, (), generator=choose)])
        window = held.text[begin : begin + frames]
        ref_text = " ".join(window.split(" ")[: 2 + len(found) % 3])
        text = window[len(ref_text) + 1 :]
        letters = sum(c.isalpha() for c in window)
        if window.endswith(" ") or len(text) < 16 or letters < 0.7 * frames:
            continue  # spaces at the end are stripped; tables of the manual are no speech
        torch.manual_seed(len(found))
        codes = spoken(quantize(f"{ref_text} ")[None], torch.tensor([len(found) % SPEAKERS]))[0]
        prompt = {"text": text, "language": "en", "duration": (len(text) + 0.5) / 25}
        found.append({**prompt, "ref_text": ref_text, "ref_codes": codes.tolist()})
    return found


def share(right: torch.Tensor, of: torch.Tensor) -> float:
    return round(float((right & of).sum() / of.sum()), 4)


if __name__ == "__main__":
    main()
