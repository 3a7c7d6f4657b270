"""Source models: load one, name its hash, find its repeated blocks and their linears.

Everything that walks a model (calibrate, quantize, swap, verify) asks here which blocks and linears it has, so all
verbs agree on the full module paths. The *backbone* is the module that holds the repeated blocks and runs them:
``model`` in a causal LM of transformers, ``llm`` in OmniVoice.
"""

from omniw4.model.files import hash_source, source_hash, weight_files
from omniw4.model.loading import DTYPES, LoadedModel, check_dtype, check_unchanged, load, skeleton, tokenizer
from omniw4.model.streaming import StreamedModel, offload, resident_bytes, stream
from omniw4.model.tree import (
    LinearShape,
    block_linears,
    check_positions,
    find_backbone,
    find_blocks,
    find_linears,
    other_matrices,
    shapes,
)

__all__ = [
    "DTYPES",
    "LinearShape",
    "LoadedModel",
    "StreamedModel",
    "block_linears",
    "check_dtype",
    "check_positions",
    "check_unchanged",
    "find_backbone",
    "find_blocks",
    "find_linears",
    "hash_source",
    "load",
    "offload",
    "other_matrices",
    "resident_bytes",
    "shapes",
    "skeleton",
    "source_hash",
    "stream",
    "tokenizer",
    "weight_files",
]
