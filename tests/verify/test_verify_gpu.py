"""On a GPU: the same verdicts through kernels, and figures that agree with the CPU's."""

import pytest

from omniw4 import verify
from omniw4.config import Verify
from tiny_checkpoint import make_checkpoint, make_model

pytestmark = pytest.mark.gpu
SETTINGS = Verify(windows=2, seq_len=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify_gpu")
    model = make_model(root / "model", "qwen3")
    return make_checkpoint(root / "checkpoint", model), model


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_a_sound_checkpoint_passes_through_kernels(folders, dtype):
    found = verify.run(*folders, settings=SETTINGS, device="cuda", dtype=dtype)
    assert found.passed, found.failed_gates
    assert "reference" not in found.path
    assert len(found.layers) == 14
    assert found.peak_memory_bytes > 0


def test_kernels_and_reference_agree(folders):
    """The same codes in the same dtype. Few tokens of a random model: its perplexity moves by 4 % between float16 and
    float32 even within the CPU's reference, so the two are compared in float16."""
    gpu = verify.run(*folders, settings=SETTINGS, device="cuda", dtype="float16", layer_tokens=0)
    cpu = verify.run(*folders, settings=SETTINGS, dtype="float16", layer_tokens=0)
    assert gpu.windows == cpu.windows
    assert gpu.perplexity.quantized == pytest.approx(cpu.perplexity.quantized, rel=0.03)
    assert gpu.kl == pytest.approx(cpu.kl, rel=0.1)
