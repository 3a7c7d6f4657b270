"""The compiled extension, on a machine without a GPU: it loads, lists its kernels, and is native INT4."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omniw4.ops import extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_sass
import ptxas_report

needs_extension = pytest.mark.skipif(bool(extension.why_missing()), reason=f"{extension.why_missing()}; make kernels")


@needs_extension
def test_the_module_lists_what_it_holds() -> None:
    module = extension.module()
    names = [ptxas_report.short_name(kernel["name"]) for kernel in module.kernels()]
    assert len(set(names)) == len(names), "a kernel is listed twice"
    for op in ("inv_rms", "quantize_lora_down", "pack_lora_act", "gemm_lora_up", "qknorm_rope"):
        for dtype in ("f16", "bf16"):
            assert any(name.startswith(f"{op}<{dtype}") for name in names), f"no {op} for {dtype}"


@needs_extension
def test_sizes_are_refused_before_anything_touches_a_gpu() -> None:
    launch = {"x": 16, "out": 16, "rows": 1, "row_stride": 8, "eps": 0.0, "device": 0, "stream": 0}
    with pytest.raises(ValueError, match="dtype is 'float32', wanted float16 or bfloat16"):
        extension.module().inv_rms(**launch, cols=8, dtype="float32")


@needs_extension
@pytest.mark.skipif(check_sass.find_cuobjdump() is None, reason="no cuobjdump: pip install nvidia-cuda-cuobjdump")
@pytest.mark.parametrize("arch", check_sass.NATIVE_ARCHS)
def test_native_int4(arch: str) -> None:
    if arch not in extension.compiled_archs():
        pytest.skip(f"the kernels are built for {extension.compiled_archs()}, not for {arch}")
    cuobjdump = check_sass.find_cuobjdump()
    assert cuobjdump is not None
    path = Path(extension.module().__file__ or "")
    assert check_sass.emulated(path, arch, cuobjdump) == []


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 0), ("80",), True),
        ((8, 6), ("80",), True),  # code for a GPU runs on later ones of its major version
        ((8, 0), ("86",), False),
        ((8, 9), ("80", "86", "89", "90a"), True),
        ((9, 0), ("90a",), True),
        ((9, 0), ("80",), False),
        ((10, 0), ("90a",), False),
        ((12, 0), ("80", "86", "89", "90a"), False),
    ],
)
def test_which_gpu_runs_what(capability: tuple[int, int], archs: tuple[str, ...], runs: bool) -> None:
    assert extension.runs_on(capability, archs) is runs


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniw4.errors import KernelError

    monkeypatch.setattr(extension, "_import", lambda: (None, "the compiled kernels are not built"))
    with pytest.raises(KernelError, match="not built") as caught:
        extension.module()
    assert "make kernels" in caught.value.hint
    assert extension.compiled_archs() == ()
