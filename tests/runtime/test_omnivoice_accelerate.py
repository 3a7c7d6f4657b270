"""The accelerated decoding against the real package, on a CPU in FP32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from omnivoice_fixture import lively_model, require_omnivoice
from omniw4.errors import ModelError, UsageError
from omniw4.runtime.omnivoice import accelerate, restore
from omniw4.runtime.qwen3_patch import accelerate as accelerate_qwen3
from omniw4.tensors import LinearSpec
from problems import assert_same
from tiny_models import qwen3, write_checkpoint

GREEDY: dict[str, Any] = {"position_temperature": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "default": {},
    "sampled codes": {"class_temperature": 0.7},
    "no guidance": {"guidance_scale": 0.0},
    "strong guidance, even steps": {**GREEDY, "guidance_scale": 5.0, "t_shift": 1.0},
    "no penalty": {**GREEDY, "layer_penalty_factor": 0.0},
    "no denoise mark": {**GREEDY, "denoise": False},
}
# text, target positions, reference text, reference positions
ITEMS = [
    ("Hello world, this is a model.", 23, "A reference.", 14),
    ("Short.", 5, None, None),
    ("The third is longer than the rest of them, is it not?", 37, "Another.", 30),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return lively_model()


@pytest.fixture(autouse=True)
def undone(model: Any) -> Any:
    yield
    restore(model)


def task(items: list[tuple[str, int, str | None, int | None]]) -> Any:
    from omnivoice.models.omnivoice import GenerationTask

    generator = torch.Generator().manual_seed(1)
    references = [None if n is None else torch.randint(0, 1024, (8, n), generator=generator) for *_, n in items]
    return GenerationTask(
        len(items),
        [item[0] for item in items],
        [item[1] for item in items],
        ["en", None, "de"][: len(items)],
        [None] * len(items),
        [item[2] for item in items],
        references,
        [0.1] * len(items),
    )


def decode(model: Any, items: list[tuple[str, int, str | None, int | None]], **settings: Any) -> list[torch.Tensor]:
    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    torch.manual_seed(5)
    with torch.inference_mode():
        return model._generate_iterative(task(items), OmniVoiceGenerationConfig(**{"num_step": 8, **settings}))


BATCHES = {"cloned voice": ITEMS[:1], "own voice": ITEMS[1:2], "batch": ITEMS}
CASES = [  # of a batch the package draws codes and positions in turns, the engine all codes first
    pytest.param(items, settings, id=f"{batch}-{name}")
    for batch, items in BATCHES.items()
    for name, settings in SETTINGS.items()
    if (batch, name) != ("batch", "sampled codes")
]


@pytest.mark.parametrize(("items", "settings"), CASES)
def test_codes_are_the_package_s(model: Any, items: list[Any], settings: dict[str, Any]) -> None:
    wanted = decode(model, items, **settings)
    accelerate(model)
    for got, codes in zip(decode(model, items, **settings), wanted, strict=True):
        assert_same(got, codes, "codes")


def test_every_step_unmasks_what_the_package_s_does(model: Any) -> None:
    """The inputs of the backbone in every step, and not only the result of the last."""
    seen: dict[str, list[torch.Tensor]] = {"package": [], "engine": []}
    handle = model.llm.register_forward_pre_hook(
        lambda module, args, kwargs: seen["package"].append(kwargs["inputs_embeds"].clone()), with_kwargs=True
    )
    decode(model, ITEMS[:1], **GREEDY)
    handle.remove()
    engine = accelerate(model).engine
    forward = engine.forward
    engine.forward = lambda hidden, *rest: seen["engine"].append(hidden.clone()) or forward(hidden, *rest)  # type: ignore[method-assign]
    decode(model, ITEMS[:1], **GREEDY)
    assert len(seen["package"]) == len(seen["engine"]) == 8
    for padded, packed in zip(seen["package"], seen["engine"], strict=True):
        row, target = padded.shape[1], ITEMS[0][1]
        assert_same(packed[:row], padded[0], "conditional row")
        assert_same(packed[row:], padded[1, :target], "unconditional row")


def test_a_batch_decodes_what_its_items_do_alone(model: Any) -> None:
    accelerate(model)
    batch = decode(model, ITEMS, **GREEDY)
    for number, item in enumerate(ITEMS):
        single = task(ITEMS)
        alone = decode_one(model, single, number)
        assert_same(batch[number], alone, item[0])


def decode_one(model: Any, whole: Any, number: int) -> torch.Tensor:
    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    with torch.inference_mode():
        return model._generate_iterative(whole.slice_task([number]), OmniVoiceGenerationConfig(num_step=8, **GREEDY))[0]


def test_generate_gives_the_same_sound(model: Any) -> None:
    reference = torch.randn(1, 24000, generator=torch.Generator().manual_seed(3)) * 0.1
    call = dict(
        text=["Hello there.", "A second one."], ref_audio=[(reference, 24000)] * 2, ref_text=["Nice."] * 2,
        duration=[0.6, 1.0], language="en", num_step=4, postprocess_output=False,
    )  # fmt: skip
    torch.manual_seed(0)
    wanted = model.generate(**call)
    accelerate(model)
    torch.manual_seed(0)
    for got, wave in zip(model.generate(**call), wanted, strict=True):
        assert_same(torch.as_tensor(got), torch.as_tensor(wave), "wave")


def test_long_text_goes_through_the_engine_in_chunks(model: Any) -> None:
    call = dict(
        text="One sentence. " * 6, language="en", num_step=2, audio_chunk_duration=1.0, audio_chunk_threshold=2.0
    )
    torch.manual_seed(0)
    (wanted,) = model.generate(**call)
    engine = accelerate(model).engine
    calls = []
    forward = engine.forward
    engine.forward = lambda *args: calls.append(args) or forward(*args)  # type: ignore[method-assign]
    torch.manual_seed(0)
    (got,) = model.generate(**call)
    assert len(calls) > 2
    assert_same(torch.as_tensor(got), torch.as_tensor(wanted), "wave")


def test_restore_gives_the_method_of_the_class_back(model: Any) -> None:
    accelerate(model)
    assert "_generate_iterative" in vars(model)
    accelerate(model)  # again: in place of the first, not around it
    assert restore(model) is True
    assert restore(model) is False
    assert model._generate_iterative.__func__ is require_omnivoice()._generate_iterative  # type: ignore[attr-defined]


def test_a_model_that_changed_dtype_falls_back_with_one_warning(model: Any) -> None:
    accelerate(model)
    model.double()
    try:
        wanted = "become torch.float64 since accelerate"
        with pytest.warns(UserWarning, match=wanted):
            assert decode(model, ITEMS[1:2], **GREEDY)[0].shape == (8, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decode(model, ITEMS[1:2], **GREEDY)
    finally:
        model.float()


def test_released_linears_are_not_missed_by_the_engine() -> None:
    model = lively_model()
    wanted = decode(model, ITEMS, **GREEDY)
    accelerate(model, release=True)
    for got, codes in zip(decode(model, ITEMS, **GREEDY), wanted, strict=True):
        assert_same(got, codes, "codes")
    assert all(p.is_meta for p in model.llm.layers.parameters() if p.dim() == 2)
    model.double()
    with pytest.raises(UsageError, match="the model has become torch"):
        decode(model, ITEMS, **GREEDY)


def test_a_setting_of_a_newer_package_falls_back(model: Any) -> None:
    from dataclasses import dataclass

    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    @dataclass
    class Newer(OmniVoiceGenerationConfig):
        remask_share: float = 0.0

    accelerate(model)
    with torch.inference_mode():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model._generate_iterative(task(ITEMS[1:2]), Newer(num_step=2))
        with pytest.warns(UserWarning, match="does not know the setting remask_share"):
            model._generate_iterative(task(ITEMS[1:2]), Newer(num_step=2, remask_share=0.5))


def test_a_checkpoint_s_linears_are_used(model: Any, tmp_path: Path) -> None:
    import omniw4
    from omniw4.model import omnivoice

    source = omnivoice.save(model, tmp_path / "source")
    write_checkpoint(source, tmp_path, LinearSpec(act_bits=16))  # 16: no grid that a last bit could cross
    quantized = omniw4.load(tmp_path / "checkpoint")
    original = torch.cat([codes.flatten() for codes in decode(model, ITEMS, **GREEDY)])
    wanted = torch.cat([codes.flatten() for codes in decode(quantized, ITEMS, **GREEDY)])
    assert not torch.equal(original, wanted)
    for host, checkpoint in ((model, tmp_path / "checkpoint"), (quantized, None)):
        accelerated = accelerate(host, checkpoint)
        assert accelerated.report()["backend"] == "reference"
        assert_same(torch.cat([codes.flatten() for codes in decode(host, ITEMS, **GREEDY)]), wanted, "codes")


def test_what_cannot_be_accelerated_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no _generate_iterative"):
        accelerate(qwen3())
    with pytest.raises(UsageError, match="no back end 'w2a2'"):
        accelerate(model, backend="w2a2")
    assert "_generate_iterative" not in vars(model)
    with pytest.raises(ModelError, match="OmniVoice decodes by itself"):
        accelerate_qwen3(model)
