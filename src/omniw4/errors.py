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
