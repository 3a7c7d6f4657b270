"""The accelerated decoding on a GPU: captured steps against uncaptured ones and against the package."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omnivoice_fixture import require_omnivoice
from omniw4 import model as models
from omniw4.bench.omnivoice import with_random_quantized
from omniw4.calibrate.omnivoice import decoding_tasks
from omniw4.calibrate.prompts import read_prompts
from omniw4.runtime.omnivoice import accelerate, restore
from omniw4.runtime.omnivoice.decoder import Decoder, Prompt
from omniw4.runtime.omnivoice.step import Sampling
from omniw4.tensors import LinearSpec
from problems import assert_same

pytestmark = pytest.mark.gpu
FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "omnivoice"
GREEDY = {"position_temperature": 0.0}
STEPS = 12


@pytest.fixture(scope="module")
def loaded() -> models.LoadedModel:
    require_omnivoice()
    found = models.load(FIXTURE, dtype="float16", device="cuda")
    found.model.float().half()
    return found


@pytest.fixture(scope="module")
def tasks(loaded: models.LoadedModel) -> list[Any]:
    return decoding_tasks(loaded, read_prompts(FIXTURE / "prompts.jsonl"))


@pytest.fixture(params=["fp16", "w4a8", "w4a4"])
def host(request: pytest.FixtureRequest, loaded: models.LoadedModel) -> Iterator[Any]:
    model = loaded.model
    if request.param != "fp16":
        spec = LinearSpec(act_bits=8 if request.param == "w4a8" else 4, scale_type="integer")
        model = with_random_quantized(model, spec)
    accelerate(model, backend=request.param, buckets=(256, 512, 1024), max_requests=4)
    yield model
    restore(model)


def together(tasks: list[Any]) -> Any:
    """One task of several."""
    names = ("texts", "target_lens", "langs", "instructs", "ref_texts", "ref_audio_tokens", "ref_rms")
    joined = {name: [getattr(task, name)[0] for task in tasks] for name in names}
    return type(tasks[0])(batch_size=len(tasks), **joined)


def decode(model: Any, task: Any, **settings: Any) -> list[torch.Tensor]:
    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    torch.manual_seed(7)
    with torch.inference_mode():
        return model._generate_iterative(task, OmniVoiceGenerationConfig(**{"num_step": STEPS, **settings}))


def prompts_of(model: Any, tasks: list[Any]) -> list[Prompt]:
    found = []
    for task in tasks:
        inputs = model._prepare_inference_inputs(
            task.texts[0], task.target_lens[0], task.ref_texts[0], task.ref_audio_tokens[0], task.langs[0],
            task.instructs[0], True,
        )  # fmt: skip
        found.append(Prompt(inputs["input_ids"][0], inputs["audio_mask"][0], task.target_lens[0]))
    return found


def test_replay_decodes_what_uncaptured_steps_do(host: Any, tasks: list[Any]) -> None:
    """Bit for bit: neither capturing nor padding changes a result, for one request or several."""
    captured: Decoder = host._omniw4_accelerated.decoder
    plain = Decoder(captured.parts, captured._embed, captured._template, buckets=())
    greedy = Sampling(num_step=STEPS, **GREEDY)
    for group in [*([task] for task in tasks[:6]), tasks[:2], tasks[4:8]]:
        prompts = prompts_of(host, group)
        for got, wanted in zip(captured.decode(prompts, greedy), plain.decode(prompts, greedy), strict=True):
            assert_same(got, wanted, group[0].texts[0])


def test_a_batch_decodes_what_its_items_do_alone(host: Any, tasks: list[Any]) -> None:
    batch = decode(host, together(tasks[:4]), **GREEDY)
    for task, codes in zip(tasks[:4], batch, strict=True):
        assert_same(codes, decode(host, task, **GREEDY)[0], task.texts[0])


def test_nothing_waits_for_the_gpu(host: Any, tasks: list[Any]) -> None:
    decoder, prompts = host._omniw4_accelerated.decoder, prompts_of(host, tasks[:1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.decode(prompts, Sampling(num_step=STEPS))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_noise_repeats_with_the_seed(host: Any, tasks: list[Any]) -> None:
    first = decode(host, tasks[0])[0]
    assert_same(decode(host, tasks[0])[0], first, "the same seed")
    torch.manual_seed(8)
    captured = host._omniw4_accelerated.decoder.decode(prompts_of(host, tasks[:1]), Sampling(num_step=STEPS))[0]
    assert not torch.equal(captured, first)


def test_what_no_graph_holds_runs_uncaptured_with_one_warning(host: Any, tasks: list[Any]) -> None:
    with pytest.warns(UserWarning, match="above the 64 of the captured graphs.*uncaptured"):
        decode(host, tasks[0], num_step=65)
    with pytest.warns(UserWarning, match="of a batch are 6 and"):
        decode(host, together(tasks[:6]), **GREEDY)
    with pytest.warns(UserWarning, match="class_temperature"):
        decode(host, tasks[0], class_temperature=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(host, together(tasks[:6]), **GREEDY)


def test_fp16_decodes_what_the_package_does(loaded: models.LoadedModel, tasks: list[Any]) -> None:
    """Up to ties of FP16 logits, which the trained model has in its noisy codebooks alone."""
    wanted = [decode(loaded.model, task, **GREEDY)[0] for task in tasks[:8]]
    accelerate(loaded.model, backend="fp16", buckets=(256, 512), max_requests=1)
    got = [decode(loaded.model, task, **GREEDY)[0] for task in tasks[:8]]
    restore(loaded.model)
    same = torch.cat([(a == b).float().flatten() for a, b in zip(got, wanted, strict=True)]).mean()
    assert same > 0.97


def test_memory_stays_where_it_was(host: Any, tasks: list[Any]) -> None:
    for number in range(60):
        decode(host, tasks[number % len(tasks)])
        if number == 20:
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
