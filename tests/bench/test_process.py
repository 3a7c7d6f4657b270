"""Cost of a process: memory it touched is seen, failures are told in its own words."""

import sys

import pytest

from omniw4.bench.process import measure_process
from omniw4.errors import OmniW4Error


def test_peak_memory_is_that_of_the_child():
    ballast = bytearray(300 << 20)  # of this process: must not be counted
    ballast[::4096] = b"x" * len(ballast[::4096])
    small = measure_process("small", [sys.executable, "-c", "pass"])
    assert small.peak_rss_bytes < 100 << 20
    large = measure_process("large", [sys.executable, "-c", "b = bytearray(200 << 20)"])
    assert large.peak_rss_bytes - small.peak_rss_bytes > 150 << 20
    assert large.what == "large"
    assert large.seconds > 0


def test_cpu_time_is_not_wall_time():
    row = measure_process("sleep", [sys.executable, "-c", "import time; time.sleep(0.5)"])
    assert row.seconds >= 0.5
    assert row.cpu_seconds < row.seconds


def test_a_failing_process_is_quoted():
    code = "import sys; print('chatter', file=sys.stderr); sys.exit('error: no model folder')"
    with pytest.raises(OmniW4Error, match=r"calibrate ended with exit code 1: no model folder"):
        measure_process("calibrate", [sys.executable, "-c", code])


def test_the_child_imports_this_package():
    row = measure_process("import", [sys.executable, "-c", "import omniw4"])
    assert row.command[-1] == "import omniw4"


def test_a_command_that_does_not_exist():
    with pytest.raises(OmniW4Error, match="cannot start '/nowhere/omniw4'"):
        measure_process("nothing", ["/nowhere/omniw4"])
