"""One error class per way to fail.

Every error a user can cause derives from :class:`OmniW4Error` and carries one sentence, a hint that names the flag
or command which helps, and the exit code the CLI ends with. A class has a hint of its own for where the place that
raises knows nothing better. Anything else that escapes is an internal error.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_VERDICT = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 101
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # as a shell shows a process that SIGPIPE ended

_LONGEST = 380  # characters of a message about a checkpoint


class OmniW4Error(Exception):
    """Base of all errors a user can cause.

    Args:
        message: one sentence naming the thing (layer, tensor, file), what was found and what was wanted.
        hint: one sentence naming the flag or command that helps; without it, the class's ``usual_hint``.
    """

    exit_code: int = EXIT_USAGE
    usual_hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class UsageError(OmniW4Error):
    """Arguments that do not fit together."""

    usual_hint = "docs/cli.md describes every option, and so does --help"


class ConfigError(OmniW4Error):
    """A config file or override that is not valid."""

    usual_hint = "configs/default.yaml lists and comments every key"


class PatternError(OmniW4Error):
    """An include, skip or override pattern that is malformed or matches nothing."""

    usual_hint = "a pattern is a glob over full paths such as '*.down_proj', or 're:' and a regular expression"


class DatasetError(OmniW4Error):
    """A calibration or evaluation text that is missing, unreadable, empty or too small."""

    usual_hint = "give a UTF-8 .txt file, a .jsonl or .parquet file with the field text, or the name of a Hub data set"


class ModelError(OmniW4Error):
    """A source model that is missing, unreadable, or not made of linears omniw4 can quantize."""

    usual_hint = "give an unquantized Hugging Face model folder, a .gguf file, or a Hub name"


class PlanError(OmniW4Error):
    """Linears that cannot be quantized as asked (found before the first forward, all at once)."""

    usual_hint = "look at the plan with --dry-run, and leave linears out with --skip"


class StatsError(OmniW4Error):
    """Calibration statistics that are missing, damaged, or of another model."""

    usual_hint = "make statistics of this model with `omniw4 calibrate MODEL --out DIR`"


class NonFiniteError(OmniW4Error):
    """Too many NaN or infinite rows where finite numbers are needed."""

    usual_hint = "repair the model's weights, or leave the linear as it is with --skip"


class OutputExistsError(OmniW4Error):
    """The output folder exists and ``--overwrite`` or ``--resume`` was not given."""

    usual_hint = "give --out another name"


class OutputLockedError(OmniW4Error):
    """Another process is writing the same output folder."""

    usual_hint = "wait for it, or give --out another name"


class PeerError(OmniW4Error):
    """Another of several processes ended before its share of the work was done."""

    usual_hint = "what it said last may tell why; start all of them again once that is mended"


class ResumeError(OmniW4Error):
    """A partial result made by another recipe, model or calibration."""

    usual_hint = "repeat the command with the old inputs, or start again with --overwrite"


class StorageError(OmniW4Error):
    """A file that cannot be written: disk full, read-only, no permission."""

    usual_hint = "check the path and its permissions, or use a folder elsewhere"


class CheckpointError(OmniW4Error):
    """A checkpoint that breaks a rule of docs/checkpoint-format.md; subclasses name the rule."""

    usual_hint = "copy the checkpoint again, or make it anew with `omniw4 quantize`"

    def __init__(self, message: str, *, hint: str = "") -> None:
        if len(message) > _LONGEST:  # a hostile file may name its tensors as long as it likes
            message = f"{message[: _LONGEST - 120]} … {message[-100:]}"
        super().__init__(message, hint=hint)


class MissingFileError(CheckpointError):
    """A file every checkpoint has (config.json, omniw4.json, the weights) is not there."""

    usual_hint = "name a folder that `omniw4 quantize` wrote; an interrupted copy lacks files"


class UnreadableFileError(CheckpointError):
    """A file of the checkpoint cannot be opened or read."""

    usual_hint = "check that it is a file, and its permissions"


class MalformedJsonError(CheckpointError):
    """config.json, omniw4.json or the shard index is not JSON, or not of the wanted structure."""


class QuantMethodError(CheckpointError):
    """config.json has no quantization_config, or one of another method."""

    usual_hint = "name a folder that `omniw4 quantize` wrote"


class FormatVersionError(CheckpointError):
    """A format version this package does not read."""


class QuantizationConfigError(CheckpointError):
    """A key or value of quantization_config that the format does not have."""


class ShardIndexError(CheckpointError):
    """The shard index and the shards contradict each other."""


class MissingShardError(CheckpointError):
    """The shard index names a file that is not there."""


class UnsafePathError(CheckpointError):
    """A file name in the shard index or in omniw4.json that leads out of the checkpoint."""


class TruncatedFileError(CheckpointError):
    """A tensor file shorter than its header says."""


class ChangedFileError(CheckpointError):
    """A file was replaced or written to between two reads of it: what was read may be of two checkpoints."""


class TrailingDataError(CheckpointError):
    """A tensor file longer than its header says."""


class MalformedHeaderError(CheckpointError):
    """The header of a tensor file is too large, not JSON, or not of the wanted structure."""


class UnknownDtypeError(CheckpointError):
    """A header names a dtype that does not exist."""


class TensorSizeError(CheckpointError):
    """A tensor whose shape and dtype do not make up its byte range."""


class TensorOverlapError(CheckpointError):
    """Two tensors of a file share bytes."""


class TensorGapError(CheckpointError):
    """Bytes of a tensor file that belong to no tensor."""


class MissingTensorError(CheckpointError):
    """A tensor the checkpoint must hold is not there."""


class UnexpectedTensorError(CheckpointError):
    """A tensor the checkpoint must not hold is there."""


class RenamedTensorError(CheckpointError):
    """A tensor is missing and an unknown one is there instead; the message names both."""


class TensorDtypeError(CheckpointError):
    """A tensor of a dtype its role does not allow."""


class TensorShapeError(CheckpointError):
    """A tensor of a shape its role does not allow."""


class HashMismatchError(CheckpointError):
    """The bytes of a tensor file are not those that were written."""


class NonFiniteTensorError(CheckpointError):
    """A tensor of a quantized linear holds NaN or inf."""


class ScaleValueError(CheckpointError):
    """A negative weight scale, an integer one above 16, or a smoothing factor that is not positive."""


class LayoutError(OmniW4Error):
    """An unknown tensor-core layout, or a repacked cache that does not belong to its checkpoint."""

    usual_hint = "`omniw4 repack DIR --layout NAME --overwrite` makes the cache anew from the checkpoint"


class OpError(OmniW4Error, ValueError):
    """A tensor of the wrong shape, dtype or device given to an op."""


class KernelError(OmniW4Error, RuntimeError):
    """A compiled kernel that is missing, or reported a failure at launch."""

    usual_hint = "compile the kernels for this GPU with `make kernels`, or run with --device cpu"


class UnsupportedGPUError(KernelError):
    """A GPU for which no compiled kernel family exists."""


class VerdictError(OmniW4Error):
    """A check ran to its end and its verdict is 'failed' (verify gates, bench gates)."""

    exit_code = EXIT_VERDICT
    usual_hint = "--json has every figure"
