"""Memory of quantizing: what the plan states is what it takes; no more than one group is held, however many blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import peaks
import pytest

from omniw4 import config
from omniw4.config import Recipe
from omniw4.quantize.pipeline import GPU_BATCH_BYTES
from omniw4.quantize.plan import make_plan

CHANGES = {"gptq": {"order": "activation"}, "smooth": {"strength": "search"}}
# recipe or what differs from the default, in_features, out_features of the linears that read one input; how many such
# inputs there are, and how many of them go through the quantizer at once
CASES = {
    "the factor of a wide input": ("default", 1536, (192,)),
    "three linears of one input": ("default", 512, (512, 512, 256)),
    "the same in another order, its smoothing searched": (CHANGES, 512, (512, 512, 256)),
    "GPTQ and the low-rank branch": ("seed", 1024, (1024,)),
    "two batches of three inputs each": ("default", 512, (512, 256), 6, 3),
    "nearest and the low-rank branch": ("rtn", 1024, (2048,)),
}


@pytest.fixture(scope="module")
def peaks_of_cases() -> dict[str, tuple[int, int]]:
    done = subprocess.run(
        [sys.executable, peaks.__file__],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="resident memory is read as Linux shows it")
@pytest.mark.parametrize("name", CASES)
def test_the_plan_states_the_peak(peaks_of_cases: dict[str, tuple[int, int]], name: str) -> None:
    planned, measured = peaks_of_cases[name]
    told = f"planned {planned >> 20} MiB, measured {measured >> 20} MiB"
    assert peaks.as_planned(planned, measured), told


def test_an_8b_model_fits_12_gib() -> None:
    """36 blocks of 4096 and 12288: the plan's peak is that of its widest input, one block or all of them."""
    recipe = config.load().recipe

    def plan(blocks: int) -> int:
        return make_plan(peaks.qwen3_shapes(blocks), recipe, peaks.qwen3_shapes(blocks)).peak_bytes(peaks.input_of)

    assert plan(36) == plan(1)
    assert plan(36) < 11 << 30, "and Python and torch take less than one more"
    on_gpu = [make_plan(peaks.qwen3_shapes(n), recipe, peaks.qwen3_shapes(n)) for n in (1, 36)]
    assert on_gpu[1].peak_bytes(peaks.input_of, GPU_BATCH_BYTES) == plan(1), "no batch is larger than one such input"
    assert on_gpu[0].reading_bytes() == on_gpu[1].reading_bytes() < 3 << 30
    assert make_plan(peaks.qwen3_shapes(1), Recipe(), peaks.qwen3_shapes(1)).needs_stats
