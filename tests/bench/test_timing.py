"""Timing arithmetic, not speed: no test here asserts how fast anything is."""

import statistics

import pytest
import torch

from omniw4.bench.environment import environment
from omniw4.bench.timing import Timing, measure


def test_figures_follow_from_the_samples():
    timing = Timing((4.0, 1.0, 7.0, 2.0))
    assert (timing.median, timing.mean, timing.min, timing.max) == (3.0, 3.5, 1.0, 7.0)
    assert timing.std == pytest.approx(statistics.stdev([4, 1, 7, 2]))
    assert timing.to_dict()["samples_us"] == [4.0, 1.0, 7.0, 2.0]
    assert Timing((5.0,)).std == 0.0


def test_warm_up_is_not_counted_and_every_call_runs(monkeypatch):
    """A clock that advances 10 µs at each call of the first weight and 30 µs at each of the second."""
    now = [0.0]
    counts = [0, 0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call(index):
        counts[index] += 1
        now[0] += (1e-5, 3e-5)[index] * (100 if counts[index] <= 2 else 1)  # the first two rounds are slow

    timing = measure([lambda: call(0), lambda: call(1)], "cpu", warmup=2, repetitions=4)
    assert counts == [6, 6]
    assert timing.samples == pytest.approx([20.0] * 4)


def test_environment_names_what_it_ran_on(monkeypatch):
    monkeypatch.setenv("PATH", "")  # neither git nor nvidia-smi: fields are empty, nothing raises
    found = environment("cpu", warmup=1, repetitions=5)
    assert found.device_type == "cpu"
    assert found.torch == torch.__version__
    assert found.commit is None
    assert (found.capability, found.clocks, found.cuda) == (None, None, None)
    line = found.line()
    assert "5 repetitions after 1" in line
    assert found.device in line
    assert "\n" not in line
