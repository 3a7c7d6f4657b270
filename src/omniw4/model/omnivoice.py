"""An OmniVoice without the Hub: random weights of any size, a byte tokenizer, and a codec, ready to generate.

What a benchmark and tests need: the time of a forward does not depend on what the weights are. Needs the package
omnivoice, which imports pydub, soundfile and torchaudio.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniw4.errors import ModelError

BACKBONE: dict[str, Any] = {  # of OmniVoice 0.2, a Qwen3-0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151676,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **BACKBONE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1280,
    "max_position_embeddings": 4096,
}
_SAMPLE_RATE, _HOP = 24000, 960  # 25 frames a second
_MARKS = ("denoise", "lang_start", "lang_end", "instruct_start", "instruct_end", "text_start", "text_end")


def import_omnivoice() -> Any:
    """The module ``omnivoice.models.omnivoice``.

    Raises:
        ModelError: the package, or one that it imports, is missing.
    """
    try:
        from omnivoice.models import omnivoice
    except ImportError as e:
        raise ModelError(f"the package omnivoice cannot be imported: {e}", hint=install_hint(e)) from e
    return omnivoice


def install_hint(error: Exception) -> str:
    """What to install where the package omnivoice, or one that it imports, is missing."""
    if "audioop" in str(error):  # which pydub imports, and Python 3.13 has no more
        return "pip install audioop-lts, which Python 3.13 and newer need"
    if not isinstance(error, ImportError):  # such as OSError, of a library built for another torch
        return "pip install --upgrade omnivoice torchaudio, so that they fit this torch"
    missing = (getattr(error, "name", None) or "omnivoice").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing != "omnivoice":
        return f"pip install {missing}, which the package omnivoice imports"
    return "pip install omnivoice"


def random_omnivoice(
    llm: Mapping[str, Any] | None = None,
    *,
    tiny_codec: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **config: Any,
) -> Any:
    """A model in eval mode with everything ``generate`` needs.

    Args:
        llm: the backbone's Qwen3 configuration; None for that of OmniVoice.
        tiny_codec: a codec of a few channels in place of one of the real size.
        dtype: of the model; the codec stays in float32, as ``OmniVoice.from_pretrained`` leaves it.
        config: further settings of ``OmniVoiceConfig``.
    """
    package = import_omnivoice()
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = package.OmniVoice(package.OmniVoiceConfig(llm_config=dict(llm or BACKBONE), **config))
    finally:
        torch.set_default_dtype(before)
    return attach(model.eval(), random_codec(tiny=tiny_codec).to(device))


def attach(model: Any, codec: nn.Module) -> Any:
    """Give a model the tokenizer and a codec, as ``OmniVoice.from_pretrained`` does."""
    from omnivoice.utils.duration import RuleDurationEstimator

    model.text_tokenizer = byte_tokenizer()
    model.audio_tokenizer = codec.eval()
    model.feature_extractor = _feature_extractor()
    model.sampling_rate = _SAMPLE_RATE
    model.duration_estimator = RuleDurationEstimator()
    return model


def save(model: Any, folder: Path) -> Path:
    """Write a model with tokenizer and codec as an ordinary model folder."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("audio_tokenizer.")}
    model.save_pretrained(folder, state_dict=own)
    model.text_tokenizer.save_pretrained(folder)
    model.audio_tokenizer.save_pretrained(folder / "audio_tokenizer")
    model.feature_extractor.save_pretrained(folder / "audio_tokenizer")
    return folder


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes that knows OmniVoice's marks: 264 tokens."""
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
    fast.add_special_tokens({"additional_special_tokens": [f"<|{mark}|>" for mark in _MARKS]})
    return fast


def random_codec(*, tiny: bool = False) -> nn.Module:
    """A Higgs audio tokenizer, 8 codebooks of 1024 codes at 25 frames a second."""
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    acoustic: dict[str, Any] = {
        "model_type": "dac",
        "encoder_hidden_size": 8 if tiny else 64,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "decoder_hidden_size": 64 if tiny else 1024,
        "upsampling_ratios": [8, 5, 4, 2, 3],
        "hidden_size": 32 if tiny else 256,
    }
    sizes: dict[str, Any] = {"target_bandwidths": [0.5, 1, 1.5, 2], "acoustic_model_config": acoustic}
    if tiny:
        sizes["semantic_model_config"] = {
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
    return HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**sizes)).eval()


def _feature_extractor() -> Any:
    from transformers import DacFeatureExtractor

    return DacFeatureExtractor(feature_size=1, sampling_rate=_SAMPLE_RATE, hop_length=_HOP)
