"""One error class per way to fail.

Every error a user can cause derives from :class:`OmniW4Error` and carries one sentence, an optional hint that
names the flag which helps, and the exit code the CLI ends with. Anything else that escapes is an internal error.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_VERDICT = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 101
EXIT_INTERRUPTED = 130


class OmniW4Error(Exception):
    """Base of all errors a user can cause.

    Args:
        message: one sentence naming the thing (layer, tensor, file), what was found and what was wanted.
        hint: one sentence naming the flag or command that helps; empty when there is none.
    """

    exit_code: int = EXIT_USAGE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OmniW4Error):
    """Arguments that do not fit together."""


class ConfigError(OmniW4Error):
    """A config file or override that is not valid."""


class PatternError(OmniW4Error):
    """An include, skip or override pattern that is malformed or matches nothing."""


class DatasetError(OmniW4Error):
    """A calibration or evaluation text that is missing, unreadable, empty or too small."""


class ModelError(OmniW4Error):
    """A source model that is missing, unreadable, or not made of linears omniw4 can quantize."""


class PlanError(OmniW4Error):
    """Linears that cannot be quantized as asked (found before the first forward, all at once)."""


class StatsError(OmniW4Error):
    """Calibration statistics that are missing, damaged, or of another model."""


class NonFiniteError(OmniW4Error):
    """Too many NaN or infinite rows where finite numbers are needed."""


class OutputExistsError(OmniW4Error):
    """The output folder exists and ``--overwrite`` or ``--resume`` was not given."""


class OutputLockedError(OmniW4Error):
    """Another process is writing the same output folder."""


class ResumeError(OmniW4Error):
    """A partial result made by another recipe, model or calibration."""


class StorageError(OmniW4Error):
    """A file that cannot be written: disk full, read-only, no permission."""


class CheckpointError(OmniW4Error):
    """A checkpoint that breaks a rule of docs/checkpoint-format.md; subclasses name the rule."""


class MissingFileError(CheckpointError):
    """A file every checkpoint has (config.json, omniw4.json, the weights) is not there."""


class UnreadableFileError(CheckpointError):
    """A file of the checkpoint cannot be opened or read."""


class MalformedJsonError(CheckpointError):
    """config.json, omniw4.json or the shard index is not JSON, or not of the wanted structure."""


class QuantMethodError(CheckpointError):
    """config.json has no quantization_config, or one of another method."""


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
    """A negative weight scale, or a smoothing factor that is not positive."""


class LayoutError(OmniW4Error):
    """An unknown tensor-core layout, or a repacked cache that does not belong to its checkpoint."""


class OpError(OmniW4Error, ValueError):
    """A tensor of the wrong shape, dtype or device given to an op."""


class KernelError(OmniW4Error, RuntimeError):
    """A compiled kernel that is missing, or reported a failure at launch."""


class UnsupportedGPUError(KernelError):
    """A GPU for which no compiled kernel family exists."""


class VerdictError(OmniW4Error):
    """A check ran to its end and its verdict is 'failed' (verify gates, bench gates)."""

    exit_code = EXIT_VERDICT
