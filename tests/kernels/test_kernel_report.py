"""What the build says of the kernels, against what the driver says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from omniw4.ops import extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import ptxas_report

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6omniw44gemm19gemm_lora_up_kernelI13__nv_bfloat16NS0_4TileILi16ELi64ELi1ELi4ELi4ELi4EEENS_8epilogue5PlainEEEvNS_16GemmLoraUpParamsE' for 'sm_86'
ptxas info    : Function properties for _ZN6omniw44gemm19gemm_lora_up_kernelI13__nv_bfloat16NS0_4TileILi16ELi64ELi1ELi4ELi4ELi4EEENS_8epilogue5PlainEEEvNS_16GemmLoraUpParamsE
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 87 registers, used 1 barriers, 512 bytes smem, 560 bytes cmem[0]
ptxas info    : Compiling entry function '_Z12other_kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z12other_kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 0 barriers
"""  # noqa: E501


def test_registers_and_spills_are_read() -> None:
    one, two = ptxas_report.parse(LOG)
    assert one == ptxas_report.Kernel("gemm_lora_up<bf16, Tile<16, 64, 1, 4, 4, 4>, Plain>", "86", 87, 512, 8, 16, 24)
    assert two == ptxas_report.Kernel("other", "90a", 28, 0, 0, 0, 0)


def test_an_entry_without_figures_is_an_error() -> None:
    with pytest.raises(ValueError, match="says nothing of registers"):
        ptxas_report.parse("\n".join(LOG.splitlines()[:3]))


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("void a::(anonymous namespace)::inv_rms_kernel<__half>(a::P, bool)", "inv_rms<f16>"),
        ("const char* a::kernel_name() [with auto kernel = a::{anonymous}::inv_rms_kernel<__half>]", "inv_rms<f16>"),
        ("void a::k_kernel<__nv_bfloat16, 4, 8>(a::P, float)", "k<bf16, 4, 8>"),
        ("const char* n() [with auto kernel = a::k_kernel<__nv_bfloat16, 4, 8>]", "k<bf16, 4, 8>"),
    ],
)
def test_names_agree_however_they_are_spelled(spelled: str, name: str) -> None:
    assert ptxas_report.short_name(spelled) == name


def test_occupancy_by_each_limit() -> None:
    assert ptxas_report.resident_blocks("80", 32, 0, 128) == 16  # warps
    assert ptxas_report.resident_blocks("80", 255, 0, 256) == 1  # registers
    assert ptxas_report.resident_blocks("86", 32, 52 * 1024, 256) == 1  # shared memory
    assert ptxas_report.resident_blocks("86", 16, 0, 32) == 16  # blocks


def test_the_table_replaces_what_was_there(tmp_path: Path) -> None:
    page = tmp_path / "kernels.md"
    page.write_text(f"before\n{ptxas_report.BEGIN}\nold\n{ptxas_report.END}\nafter\n", encoding="utf-8")
    launch = {"threads": 128, "dynamic_shared_bytes": 0}
    ptxas_report.write_table(page, [ptxas_report.with_launch(k, launch) for k in ptxas_report.parse(LOG)])
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `other` | 128 | 0.0 |" in text


def test_a_kernel_that_the_module_does_not_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in the module's list"):
        ptxas_report.with_launch(ptxas_report.parse(LOG)[0], None)


@pytest.mark.gpu
def test_the_driver_agrees_on_registers_and_occupancy() -> None:
    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    arch = next(a for a in ptxas_report.MULTIPROCESSORS if a.rstrip("a") == f"{major}{minor}")
    for kernel in extension.loaded(device).load(device=0):
        blocks = ptxas_report.resident_blocks(arch, kernel["registers"], kernel["shared_bytes"], kernel["threads"])
        assert blocks == kernel["blocks_per_multiprocessor"], kernel
        assert kernel["local_bytes"] == 0, kernel
