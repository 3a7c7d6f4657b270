"""Step-wise comparison of decoding, on the trained fixture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from omnivoice_fixture import lively_model, require_omnivoice
from omniw4 import model as models
from omniw4.calibrate.omnivoice import decoding_tasks
from omniw4.calibrate.prompts import PromptSet, SpeechPrompt, read_prompts
from omniw4.verify.omnivoice import check_decoding

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "omnivoice"
STEPS = 6


@pytest.fixture(scope="module")
def loaded() -> models.LoadedModel:
    require_omnivoice()
    return models.load(FIXTURE)


@pytest.fixture(scope="module")
def tasks(loaded: models.LoadedModel) -> list[Any]:
    prompts = read_prompts(FIXTURE / "prompts.jsonl")
    return decoding_tasks(loaded, PromptSet(prompts.prompts[:2], prompts.name, prompts.sha256))


def test_the_fixture_has_learned_its_language(loaded: models.LoadedModel, tasks: list[Any]) -> None:
    """Greedy decoding by the package says the text: a code of the first codebook is the class of a character."""
    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    for task in tasks:
        with torch.inference_mode():
            config = OmniVoiceGenerationConfig(num_step=STEPS, position_temperature=0.0)
            (codes,) = loaded.model._generate_iterative(task, config)  # type: ignore[operator]
        said = task.texts[0].lower()
        assert codes.shape[1] == len(said)
        letters = [(code, c) for code, c in zip(codes[0].tolist(), said, strict=True) if c.isalpha()]
        right = sum(code == ord(c) - ord("a") + 1 for code, c in letters)
        assert right > 0.9 * len(letters)


def test_a_model_agrees_with_itself(loaded: models.LoadedModel, tasks: list[Any]) -> None:
    found = check_decoding(loaded.model, loaded.model, tasks, num_step=STEPS)
    assert (found.agreement, found.match, found.kl) == (1.0, 1.0, 0.0)
    assert found.identical == found.prompts == 2
    assert found.masked[0] == found.codes == 8 * sum(task.target_lens[0] for task in tasks)
    assert found.masked == sorted(found.masked, reverse=True)
    assert found.to_dict()["agreement_by_step"] == [1.0] * STEPS


def test_the_original_s_decoding_is_the_package_s() -> None:
    """What both models are shown in a step is what the package shows its model."""
    from omnivoice.models.omnivoice import OmniVoiceGenerationConfig

    model = lively_model()
    other = copy.deepcopy(model)  # without the hook
    reference = SpeechPrompt("Hello there.", 0.5, ref_text="A voice.", ref_codes=torch.arange(8 * 7).view(8, 7))
    (task,) = decoding_tasks(
        models.LoadedModel(model, model.text_tokenizer, "tiny", "hash"), PromptSet([reference], "p", "0")
    )
    seen: list[torch.Tensor] = []
    model.llm.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"][:1].clone()), with_kwargs=True
    )
    with torch.inference_mode():
        model._generate_iterative(task, OmniVoiceGenerationConfig(num_step=STEPS, position_temperature=0.0))
    package, seen[:] = list(seen), []
    check_decoding(model, other, [task], num_step=STEPS)
    ours = seen[0::2]  # conditional and unconditional rows in turns
    assert len(ours) == len(package) == STEPS
    for step in range(STEPS):
        assert torch.equal(ours[step], package[step]), f"step {step}"


def test_a_damaged_model_disagrees(loaded: models.LoadedModel, tasks: list[Any]) -> None:
    damaged = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for name, parameter in damaged.named_parameters():
            if "mlp.down_proj" in name:
                parameter += torch.randn_like(parameter) * parameter.std() * 0.3
    found = check_decoding(loaded.model, damaged, tasks, num_step=STEPS)
    assert 0.3 < found.agreement < 0.999
    assert 0.3 < found.match < 0.999
    assert found.kl > 0.001
