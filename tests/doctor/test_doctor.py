"""Each way in which a machine can be wrong gets its own line of advice, and a right one none."""

from __future__ import annotations

import importlib
import importlib.metadata
import json

import pytest
import torch

from omniw4 import doctor
from omniw4.cli import app
from omniw4.doctor import gpu, kernels, machine, software
from omniw4.doctor.check import Check
from omniw4.errors import KernelError
from omniw4.ops import CANONICAL, extension
from omniw4.runtime.linear import W4A4Linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(kernels.SPECS))
def test_the_known_answer_is_what_plain_integers_say(name: str) -> None:
    x, linear, y = kernels.known_answer(kernels.SPECS[name])
    assert y.abs().max() < 2048, "FP16 holds every integer up to 2048"
    torch.testing.assert_close(linear.dequantize(torch.float64) @ x.double().T, y.double().T, rtol=0, atol=0)
    assert kernels.try_family(CANONICAL, kernels.SPECS[name], CPU) == "exact"


def test_a_family_that_computes_wrong_numbers_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    right = W4A4Linear.forward

    def off_by_one(self: W4A4Linear, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        y[3, 5] += 1
        return y

    monkeypatch.setattr(W4A4Linear, "forward", off_by_one)
    check = kernels._family("reference", CANONICAL, CPU)
    assert check.status == "problem"
    assert "WRONG in 1 of 7104 values" in check.found
    assert check.advice


def test_a_family_that_is_not_compiled_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: W4A4Linear, *_: object, **__: object) -> None:
        raise KernelError("no such kernel")

    monkeypatch.setattr(W4A4Linear, "prepare", missing)
    check = kernels._family("mma_s8 on cuda:0", "mma_s8", CPU)
    assert check.status == "note"
    assert "no such kernel" in check.found


def test_kernels_that_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_missing", lambda: "the compiled kernels are not built")
    found = {check.name: check for check in kernels.checks()}
    assert found["compiled"].status == ("warning" if torch.cuda.is_available() else "note")
    assert "make kernels" in found["compiled"].advice


@pytest.mark.parametrize(
    ("built", "driver", "status", "advice"),
    [
        (None, None, "note", ""),
        (None, (13, 0), "problem", "CUDA build"),
        ("13.0", None, "note", ""),
        ("13.0", (12, 4), "problem", "update the NVIDIA driver"),
    ],
)
def test_torch_against_the_driver(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: tuple[int, int] | None, status: str, advice: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    check = gpu._torch_build(driver)
    assert check.status == status
    assert advice in check.advice


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [("2.13.0+cpu", "2.11", True), ("2.9.1", "2.11", False), ("5", "5", True), ("3.0rc1", "3", True)],
)  # fmt: skip
def test_versions_compare_by_number(version: str, least: str, enough: bool) -> None:
    assert software.at_least(version, least) is enough


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0"])
def test_a_transformers_of_another_major_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: version if n == "transformers" else known(n))
    check = next(c for c in software.checks() if c.name == "transformers")
    assert check.status == "problem"
    assert check.advice == "pip install 'transformers>=5,<6'"


@pytest.mark.parametrize(
    ("error", "said", "advice"),
    [
        (ModuleNotFoundError("No module named 'torchaudio'", name="torchaudio"), "'torchaudio'", "install torchaudio"),
        (OSError("libtorchaudio.so: undefined symbol"), "undefined symbol", "fit this torch"),
        (None, "0.2.1", ""),
    ],
)
def test_an_omnivoice_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str, advice: str
) -> None:
    def imports(name: str) -> None:
        assert name == "omnivoice.models.omnivoice"
        if error is not None:
            raise error

    monkeypatch.setattr(software, "_version", lambda name: "0.2.1")
    monkeypatch.setattr(importlib, "import_module", imports)
    check = next(c for c in software.checks() if c.name == "omnivoice")
    assert check.status == ("ok" if error is None else "warning")
    assert said in check.found
    assert advice in check.advice
    monkeypatch.setattr(software, "_version", lambda name: None)
    assert software._omnivoice().status == "note", "not installed is no fault"


def test_versions_agree_with_the_package_s_own_requirements() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name, least in software.REQUIRED.items():
        assert f'"{name}>={least}' in text
    assert f'requires-python = ">={".".join(map(str, software.PYTHON))}"' in text


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(machine, "LITTLE_DISK", 1 << 62)
    found = machine.checks()
    assert {check.status for check in found if check.name != "cores"} == {"warning"}
    assert all(check.advice for check in found if check.status == "warning")


def test_memory_is_what_the_system_has() -> None:
    free = machine.available_memory()
    assert free is not None
    assert 0 < free < 1 << 50


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {check["group"] for check in document["checks"]} == {"software", "machine", "gpu", "kernels"}
    bad = [Check("gpu", "driver", "problem", "broken", "mend it"), Check("gpu", "toolkit", "ok", "nvcc 13.0")]
    monkeypatch.setattr(doctor, "run", lambda: bad)
    assert app.run(["doctor"]) == 1
    told = capsys.readouterr()
    assert "-> mend it" in told.out
    assert told.err.startswith("error: 1 problem: driver")


@pytest.mark.gpu
def test_every_family_that_runs_here_is_exact() -> None:
    found = [check for check in kernels.checks() if " on cuda:" in check.name and not check.name.startswith("taken")]
    assert any(check.status == "ok" for check in found)
    assert not [check for check in found if check.status == "problem"]
