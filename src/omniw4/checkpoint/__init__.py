"""The one place that knows names, shapes, dtypes and versions of the format (docs/checkpoint-format.md)."""

from omniw4.checkpoint.inspect import Summary, summarize
from omniw4.checkpoint.layers import LayerStore
from omniw4.checkpoint.origin import other_origin, require_origin
from omniw4.checkpoint.reader import Checkpoint
from omniw4.checkpoint.schema import parse_quantization_config, quantization_config
from omniw4.checkpoint.writer import MAX_SHARD_SIZE, assemble, parse_size

__all__ = [
    "MAX_SHARD_SIZE",
    "Checkpoint",
    "LayerStore",
    "Summary",
    "assemble",
    "other_origin",
    "parse_quantization_config",
    "parse_size",
    "quantization_config",
    "require_origin",
    "summarize",
]
