"""The quick search for silence against the package's own, sample by sample, and where it is in place."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnivoice_fixture import lively_model
from omniw4.runtime.omnivoice import accelerate, restore, silence

audio = pytest.importorskip("omnivoice.utils.audio", reason="the package omnivoice is not installed")

LEVELS = (0.0, 0.0001, 103 / 32768, 103.9 / 32768, 104 / 32768, 0.004, 0.1, 1.5)  # silence ends at 104 of 32768


def waveform(stretches: list[tuple[float, int]], seed: int, tail: int = 0) -> np.ndarray:
    """Stretches of (level, ms) at 24 kHz, noise or a constant, and some samples more."""
    rng = np.random.default_rng(seed)
    parts = [
        level * (rng.standard_normal(24 * ms) if i % 2 else np.sign(rng.standard_normal(24 * ms)))
        for i, (level, ms) in enumerate(stretches)
    ]
    return np.concatenate([*parts, 0.2 * rng.standard_normal(tail)]).astype(np.float32)[None]


stretches = st.lists(st.tuples(st.sampled_from(LEVELS), st.integers(0, 900)), min_size=0, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    stretches, st.integers(0, 99), st.integers(0, 40), st.sampled_from([(200, 100, 200), (500, 100, 100), (13, 0, 7)])
)
def test_samples_are_the_package_s(
    parts: list[tuple[float, int]], seed: int, tail: int, ms: tuple[int, int, int]
) -> None:
    wave = waveform(parts, seed, tail)
    wanted = audio.remove_silence(wave, 24_000, *ms)
    got = silence.remove_silence(wave, 24_000, *ms)
    assert got.dtype == wanted.dtype
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("samples", [0, 1, 11, 12, 13, 23, 24, 36, 60, 4799, 4800, 4812, 12_011, 12_012])
@pytest.mark.parametrize("level", [0.0, 0.3])
def test_short_waveforms(samples: int, level: float) -> None:
    wave = np.full((1, samples), level, dtype=np.float32)
    assert np.array_equal(
        silence.remove_silence(wave, 24_000, 200, 100, 200), audio.remove_silence(wave, 24_000, 200, 100, 200)
    )


def test_a_real_request_gets_shorter() -> None:
    wave = waveform([(0.0, 700), (0.2, 500), (0.0, 1500), (0.2, 400), (0.0, 900)], 0)
    got = silence.remove_silence(wave, 24_000, 500, 100, 100)
    assert got.shape[1] == audio.remove_silence(wave, 24_000, 500, 100, 100).shape[1] < wave.shape[1] - 24 * 1000


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's module as it is imported, whatever models other tests have left accelerated."""
    from omnivoice.models import omnivoice

    monkeypatch.setattr(omnivoice, "remove_silence", audio.remove_silence)
    monkeypatch.setattr(silence, "_models", weakref.WeakSet())
    return omnivoice


def test_it_is_there_while_a_model_is_accelerated(package: Any) -> None:
    original = package.remove_silence
    one, other = lively_model(), lively_model()
    accelerate(one)
    accelerate(other)
    quick: Any = package.remove_silence
    assert quick is not original
    assert quick.original is original
    stereo = np.zeros((2, 4800), dtype=np.float32)
    assert np.array_equal(quick(stereo, 24_000), original(stereo, 24_000)), "what it does not cover the package does"
    restore(one)
    assert package.remove_silence is quick, "the other model still uses it"
    restore(other)
    assert package.remove_silence is original


def test_a_model_that_is_gone_holds_nothing_back(package: Any) -> None:
    original = package.remove_silence
    one, other = lively_model(), lively_model()
    accelerate(one)
    accelerate(other)
    del one
    gc.collect()
    restore(other)
    assert package.remove_silence is original


@pytest.mark.parametrize(
    "changed",
    [lambda sound, *ms: sound[:, ::2], lambda sound, rate: sound],
    ids=["another result", "another signature"],
)
def test_a_package_that_does_something_else_is_left_alone(package: Any, changed: Any) -> None:
    package.remove_silence = changed
    model = lively_model()
    accelerate(model)
    assert package.remove_silence is changed
    assert restore(model)
