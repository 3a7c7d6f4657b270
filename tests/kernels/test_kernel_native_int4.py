"""The compiled extension, on a machine without a GPU: it loads, lists its kernels, and is native INT4."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from omniw4 import ops, repack
from omniw4.ops import extension
from omniw4.tensors import LinearSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import build_kernels
import check_sass
import ptxas_report

needs_extension = pytest.mark.skipif(bool(extension.why_missing()), reason=f"{extension.why_missing()}; make kernels")


@needs_extension
def test_the_module_lists_what_it_holds() -> None:
    module = extension.module()
    names = [ptxas_report.short_name(kernel["name"]) for kernel in module.kernels()]
    assert len(set(names)) == len(names), "a kernel is listed twice"
    for op in ("inv_rms", "quantize_lora_down", "pack_lora_act", "gemm_lora_up", "gemm_lora_up_s8", "qknorm_rope"):
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
        ((12, 0), ("80", "86", "89", "90a", "89+ptx"), True),  # what the driver makes of PTX
        ((10, 0), ("90a", "80+ptx"), True),
        ((8, 6), ("89", "89+ptx"), False),
    ],
)
def test_which_gpu_runs_what(capability: tuple[int, int], archs: tuple[str, ...], runs: bool) -> None:
    assert extension.runs_on(capability, archs) is runs


def test_ptx_is_told_apart() -> None:
    archs = ("80", "90a", "80+ptx")
    assert extension.told(archs) == "sm_80, sm_90a and as PTX of 8.0 for newer ones"
    assert [c for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)) if extension.compiled_as_ptx(c, archs)] == [
        (10, 0),
        (12, 0),
    ]
    assert build_kernels.told_archs(["80", "89", "90a"]) == "80 89 90a 89+ptx"
    assert build_kernels.told_archs(["90a"]) == "90a"


def test_families_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which family each GPU takes, of a build for the usual architectures."""
    capability = (0, 0)
    archs = ("80", "86", "89", "90a", "89+ptx")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(extension, "compiled_archs", lambda: archs)
    monkeypatch.setattr(extension, "usable", lambda device: extension.runs_on(capability, archs))
    device = torch.device("cuda", 0)
    for capability, wanted in {
        (8, 0): ("mma_s4", "mma_s8", "mma_s8", "mma_s8"),
        (8, 6): ("mma_s4", "mma_s8", "mma_s8", "mma_s8"),
        (8, 9): ("mma_s4", "mma_s8", "mma_s8", "mma_s8"),
        (9, 0): ("wgmma_s8",) * 4,
        (10, 0): ("mma_s8",) * 4,
        (12, 0): ("mma_s8",) * 4,
        (7, 5): ("canonical",) * 4,
    }.items():
        kinds = [("float16", 4), ("float16", 8), ("integer", 4), ("integer", 8)]
        assert tuple(ops.kernel_layout(device, bits, scales) for scales, bits in kinds) == wanted
        specs = [LinearSpec(act_bits=bits, scale_type=scales) for scales, bits in kinds]  # type: ignore[arg-type]
        if wanted[0] != "canonical":
            assert tuple(repack.auto(capability, [spec]) for spec in specs) == wanted
        assert ops.kernel_layout(device, 16) == "canonical"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniw4.errors import KernelError

    monkeypatch.setattr(extension, "_import", lambda: (None, "the compiled kernels are not built"))
    with pytest.raises(KernelError, match="not built") as caught:
        extension.module()
    assert "make kernels" in caught.value.hint
    assert extension.compiled_archs() == ()
