"""A tiny random OmniVoice of full structure, built without the Hub and saved as an ordinary model folder.

Needs the package omnivoice (0.2, installed without its dependencies) and pydub and soundfile, which it imports. It also
imports torchaudio; where that is missing, conftest.py puts ``tests/stubs`` on the path.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def require_omnivoice() -> type:
    """The class OmniVoice; skips the test, with the reason, where the package is not installed."""
    for package in ("omnivoice", "pydub", "soundfile"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed (pip install --no-deps omnivoice pydub soundfile)")
    from omnivoice.models.omnivoice import OmniVoice

    return OmniVoice


def random_model(**llm: Any) -> Any:
    """A random model ready to generate; ``llm`` changes its backbone's Qwen3 configuration."""
    require_omnivoice()
    from omniw4.model import omnivoice

    return omnivoice.random_omnivoice({**omnivoice.TINY, **llm}, tiny_codec=True)


def lively_model() -> Any:
    """A random model with logits far from uniform, so that a wrong input changes what is decoded, and no ties."""
    import torch

    model = random_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "audio_tokenizer" not in name and parameter.dim() == 2:
                parameter.normal_(std=0.3 if "embed" in name or "heads" in name else parameter.shape[1] ** -0.5)
    return model


def build(folder: Path, **llm: Any) -> Path:
    """Save backbone, tokenizer and codec with random weights to ``folder``.

    Args:
        llm: changes to the backbone's Qwen3 configuration.
    """
    model = random_model(**llm)
    from omniw4.model import omnivoice

    return omnivoice.save(model, folder)
