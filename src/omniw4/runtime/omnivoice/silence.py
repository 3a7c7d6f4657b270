"""``remove_silence`` of the package omnivoice, with the same samples as a result, in a fraction of the time.

The package converts a waveform to 16-bit samples and looks at them through pydub, one window every 10 ms: a window is
silent when the whole part of its RMS is at most -50 dB of full scale, that is, below :data:`_LOUD`. Here the sum of
squares of a window is the difference of two prefix sums, and the comparison one of integers, so no rounding differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

_LOUD = 104  # least whole RMS of 16-bit samples above -50 dB: 20·log10(103/32768) = -50.05, of 104 -49.97
_STEP = 10  # ms between two windows, and length of a window at the edges
_NAME = "remove_silence"


def remove_silence(
    audio: np.ndarray, sampling_rate: int, mid_sil: int = 300, lead_sil: int = 100, trail_sil: int = 300
) -> np.ndarray:
    """Shorten silences inside a waveform and trim those at its edges, bit for bit as ``omnivoice.utils.audio`` does.

    Args:
        audio: ``[1, T]`` float32, full scale 1.
        sampling_rate: samples a second, a multiple of 1000.
        mid_sil: ms of silence, above 10, from which on it is cut; as much of it is kept on either side.
        lead_sil, trail_sil: ms of silence kept at the edges.

    Returns:
        ``[1, T']`` float32, in steps of 16-bit samples.
    """
    samples = (audio[0] * 32768.0).clip(-32768, 32767).astype(np.int16)
    frames = sampling_rate // 1000  # a millisecond
    length = round(1000 * (len(samples) / sampling_rate))  # ms
    samples = np.pad(samples, (0, max(0, length * frames - len(samples))))[: length * frames]
    kept = [samples[begin * frames : end * frames] for begin, end in _sounding(samples, frames, length, mid_sil)]
    samples = np.concatenate(kept) if kept else samples[:0]
    samples = samples[max(0, _leading(samples, frames) - lead_sil) * frames :]
    samples = samples[: len(samples) - max(0, _leading(samples[::-1], frames) - trail_sil) * frames]
    return samples.astype(np.float32)[None] / 32768.0


def _sounding(samples: np.ndarray, frames: int, length: int, silence: int) -> list[tuple[int, int]]:
    """(begin, end) in ms of what stays when silences of at least ``silence`` ms are cut out of ``length`` ms."""
    quiet: list[tuple[int, int]] = []
    if length >= silence:
        last = length - silence
        begins = np.arange(0, last + 1, _STEP)
        if last % _STEP:
            begins = np.append(begins, last)
        sums = _prefix_sums(samples)
        found = begins[_is_quiet(sums, begins * frames, (begins + silence) * frames)]
        if len(found):
            gaps = np.flatnonzero(np.diff(found) > silence)
            firsts, lasts = np.append(found[:1], found[gaps + 1]), np.append(found[gaps], found[-1:])
            quiet = [(int(first), int(last) + silence) for first, last in zip(firsts, lasts, strict=True)]
    edges = [0, *(edge for stretch in quiet for edge in stretch), length]
    loud = list(zip(edges[::2], edges[1::2], strict=True))
    # a waveform that begins or ends in silence has nothing there; one without any silence stays, even if empty
    loud = [(begin, end) for begin, end in loud if begin < end or not quiet]
    widened = [[begin - silence, end + silence] for begin, end in loud]
    for left, right in pairwise(widened):
        if right[0] < left[1]:
            left[1] = right[0] = (left[1] + right[0]) // 2
    return [(max(begin, 0), min(end, length)) for begin, end in widened]


def _leading(samples: np.ndarray, frames: int) -> int:
    """Ms of silence at the begin, in steps of 10 unless all of it is silent; ``samples`` is whole milliseconds."""
    length = len(samples) // frames
    begins = np.arange(0, length, _STEP)
    ends = np.minimum(begins + _STEP, length)
    loud = np.flatnonzero(~_is_quiet(_prefix_sums(samples), begins * frames, ends * frames))
    return int(begins[loud[0]]) if len(loud) else length


def _prefix_sums(samples: np.ndarray) -> np.ndarray:
    """``[T + 1]`` int64: sum of the squares of the samples before each."""
    sums = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum(np.square(samples, dtype=np.int64), out=sums[1:])
    return sums


def _is_quiet(sums: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each stretch of samples whether the whole part of its RMS is below :data:`_LOUD`."""
    quiet: np.ndarray = sums[ends] - sums[begins] < _LOUD * _LOUD * (ends - begins)
    return quiet


class _Quick:
    """In place of the package's function: the one above, or the package's where that does something else."""

    def __init__(self, original: Callable[..., np.ndarray]) -> None:
        self.original = original

    def __call__(
        self, audio: np.ndarray, sampling_rate: int, mid_sil: int = 300, lead_sil: int = 100, trail_sil: int = 300
    ) -> np.ndarray:
        mono = audio.ndim == 2 and audio.shape[0] == 1
        function = remove_silence if mono and sampling_rate % 1000 == 0 and mid_sil > _STEP else self.original
        return function(audio, sampling_rate, mid_sil, lead_sil, trail_sil)

    def agrees(self) -> bool:
        """Whether this version of the package still does what the function above does, tried on a second of sound."""
        time = np.arange(24_000) / 24_000
        sound = (np.sin(2764.6 * time) * (np.sin(9.0 * time) > 0.3)).astype(np.float32)[None]
        try:
            return np.array_equal(self.original(sound, 24_000, 200, 30, 40), self(sound, 24_000, 200, 30, 40))
        except Exception:  # of a signature, or of pydub, on the way to a result that is not needed
            return False


_models: weakref.WeakSet[Any] = weakref.WeakSet()  # whose package has the quick function on their behalf


def use_quick(model: Any) -> None:
    """Let the package of ``model`` find silences by :func:`remove_silence`; nothing happens if that would differ."""
    names = _names(model)
    if _NAME not in names:
        return
    if not isinstance(names[_NAME], _Quick):
        quick = _Quick(names[_NAME])
        if not quick.agrees():
            return
        names[_NAME] = quick
    _models.add(model)


def use_original(model: Any) -> None:
    """Undo :func:`use_quick`, once no other model of the package wants it."""
    _models.discard(model)
    names = _names(model)
    if isinstance(names.get(_NAME), _Quick) and all(_names(other) is not names for other in _models):
        names[_NAME] = names[_NAME].original


def _names(model: Any) -> dict[str, Any]:
    """The global names that the model's own methods see: those of the package's module, also for a subclass."""
    return getattr(getattr(type(model), "_post_process_audio", None), "__globals__", {})
