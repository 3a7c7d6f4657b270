"""What the tests of the command line share: a run and what it said, tiny models on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCABULARY = 128, 3, 384
CALIBRATE = ("--samples", 4, "--seq-len", 64)  # small enough for a test


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    def failed(self, code: int, *words: str) -> None:
        """It ended with this code, one error sentence and no traceback; each word is in what it said."""
        assert self.code == code, self.stderr
        assert sum(line.startswith("error: ") for line in self.stderr.splitlines()) == 1, self.stderr
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in self.stderr, f"{word!r} is not in {self.stderr!r}"


Run = Callable[..., Ran]


def environment(**variables: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("OMNIW4_DEBUG", "COLUMNS")}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def save_model(folder: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A tiny random causal LM with a byte-level tokenizer, in an ordinary Hugging Face folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        **changes,
    }
    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}
    config = getattr(transformers, f"{names[kind]}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    model.to(torch.float16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<end>": 0, **{c: i + 1 for i, c in enumerate(letters)}}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder
