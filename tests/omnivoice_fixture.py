"""A tiny random OmniVoice of full structure, built without the Hub and saved as an ordinary model folder.

Needs the package omnivoice (0.2, installed without its dependencies) and pydub and soundfile, which it imports. It also
imports torchaudio; where that is missing, conftest.py puts ``tests/stubs`` on the path.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch import nn


def require_omnivoice() -> type:
    """The class OmniVoice; skips the test, with the reason, where the package is not installed."""
    for package in ("omnivoice", "pydub", "soundfile"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed (pip install --no-deps omnivoice pydub soundfile)")
    from omnivoice.models.omnivoice import OmniVoice

    return OmniVoice


def build(folder: Path, **llm: Any) -> Path:
    """Save backbone, tokenizer and codec with random weights to ``folder``.

    Args:
        llm: changes to the backbone's Qwen3 configuration.
    """
    omnivoice = require_omnivoice()
    import torch
    from omnivoice.models.omnivoice import OmniVoiceConfig

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    backbone = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1280,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": True,
        **llm,
    }
    model: nn.Module = omnivoice(OmniVoiceConfig(llm_config=backbone))
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    _save_codec(folder / "audio_tokenizer")
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    names = ("denoise", "lang_start", "lang_end", "instruct_start", "instruct_end", "text_start", "text_end")
    fast.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    return fast


def _save_codec(folder: Path) -> None:
    from transformers import DacFeatureExtractor, HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    acoustic = {
        "model_type": "dac",
        "encoder_hidden_size": 8,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "decoder_hidden_size": 64,
        "upsampling_ratios": [8, 5, 4, 2, 3],
        "hidden_size": 32,
    }
    semantic = {
        "model_type": "hubert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": [16] * 7,
        "mask_time_prob": 0.0,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    config = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2], acoustic_model_config=acoustic, semantic_model_config=semantic
    )
    HiggsAudioV2TokenizerModel(config).save_pretrained(folder)
    DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960).save_pretrained(folder)
