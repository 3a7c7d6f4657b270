"""What the package trusts: no pickle, no code of a model unless asked, no network with local inputs."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import kills
import pytest
import torch

from omniw4 import model as models
from omniw4.cli import app
from omniw4.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "setup.py"])
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "os.system", "os.popen", "torch.load", "torch.save", "torch.jit.load"),
    *("torch.hub.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "__import__"),
}
_TRUST = "trust_remote_code"


def unsafe(source: str) -> Iterator[str]:
    """Sentences on imports and calls that run what a file says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno} imports {n}" for n in names if n.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield f"line {node.lineno} calls {ast.unparse(node.func)}"
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "shell") and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno} gives {keyword.arg}"
                if keyword.arg == "weights_only" and ast.unparse(keyword.value) != "True":
                    yield f"line {node.lineno} gives weights_only"


def trusting(source: str) -> Iterator[str]:
    """Places where trust_remote_code is anything but what the caller was given."""
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(_TRUST)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            handed_on = [k for k, v in zip(node.keys, node.values, strict=True) if ast.unparse(v) == _TRUST]
            guarded |= {id(key) for key in handed_on}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == _TRUST:
            if not ast.unparse(node.value).endswith(_TRUST):
                yield f"line {node.value.lineno} passes {ast.unparse(node.value)}"
        elif isinstance(node, ast.Constant) and node.value == _TRUST and id(node) not in guarded:
            yield f"line {node.lineno} sets it without asking"
        elif isinstance(node, ast.arguments):
            named = [*zip(reversed(node.args), reversed(node.defaults), strict=False)]
            named += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None]
            for argument, default in named:
                if argument.arg == _TRUST and ast.unparse(default) != "False":
                    yield f"line {argument.lineno} trusts by default"


def offenders(search: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    found = {str(file.relative_to(ROOT)): list(search(file.read_text(encoding="utf-8"))) for file in SOURCES}
    assert len(found) > 100
    return {name: sentences for name, sentences in found.items() if sentences}


def test_nothing_is_unpickled_or_executed() -> None:
    assert offenders(unsafe) == {}


def test_code_of_a_model_is_trusted_only_when_the_caller_says_so() -> None:
    assert offenders(trusting) == {}


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from dill import loads", "import torch; torch.load('x')", "eval('1')"),
        *("np.load(f, allow_pickle=True)", "subprocess.run(c, shell=True)", "f(weights_only=False)"),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert len(list(unsafe(source))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        *("load(x, trust_remote_code=True)", "def f(*, trust_remote_code=True): ..."),
        *("load(**{'trust_remote_code': True})", "load(**{'trust_remote_code': not trust_remote_code})"),
        *("def f(trust_remote_code=True, x=1): ...", "a['trust_remote_code'] = True"),
    ],
)
def test_the_search_finds_trust(source: str) -> None:
    assert len(list(trusting(source))) == 1


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_a_weight_file_is_not_run(model: Path, tmp_path: Path) -> None:
    """A model whose weights are a .bin file with a payload: refused, and the payload has not run."""
    folder = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    marker = tmp_path / "it-ran"
    torch.save({"model.norm.weight": _Payload(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        models.load(folder)
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert marker.exists(), "the payload works where pickles are trusted"


def test_code_in_a_model_folder_is_not_run(model: Path, text: Path, tmp_path: Path) -> None:
    """Every verb that takes a model refuses one that brings code, and names the flag; the code has not run."""
    folder = shutil.copytree(model, tmp_path / "model")
    marker = tmp_path / "it-ran"
    code = f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\nfrom transformers import Qwen3Config as Evil\n"
    (folder / "evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    for verb in (
        ("generate", folder, "--out", tmp_path / "own.jsonl"),
        ("calibrate", folder, "--dataset", text, "--out", tmp_path / "stats"),
        ("quantize", folder, "--config", "rtn", "--out", tmp_path / "out"),
        ("quantize", folder, "--config", "rtn", "--dry-run"),
    ):
        told = tmp_path / "stderr"
        assert kills.wait(kills.start(*verb, stderr=told)) == 2, told.read_text()
        assert "--trust-remote-code" in told.read_text()
        assert not marker.exists(), verb


NO_NETWORK = """
import sys
import tomllib
attempts = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        attempts.append((event, str(arguments)[:200]))
        raise OSError("the network is cut off")
sys.addaudithook(watch)
from omniw4.cli import app
for verb in sys.argv[1].split(" ; "):
    code = app.run(verb.split())
    print(f"{code} {verb.split()[0]}", flush=True)
print("attempts", attempts)
"""


def test_no_verb_with_local_inputs_looks_for_the_network(model: Path, text: Path, tmp_path: Path) -> None:
    """One process without HF_HUB_OFFLINE in which every look-up and connection fails and is counted."""
    stats, out = tmp_path / "stats", tmp_path / "out"
    verbs = [
        f"generate {model} --out {tmp_path / 'own.jsonl'} --samples 2 --seq-len 16 --quiet",
        f"calibrate {model} --dataset {text} --out {stats} --samples 4 --seq-len 64 --quiet",
        f"quantize {model} --stats {stats} --dry-run --quiet",
        f"quantize {model} --stats {stats} --out {out} --quiet",
        f"inspect {out}",
        f"repack {out} --layout wgmma_s8 --quiet",
        f"verify {out} --model {model} --dataset {text} --windows 1 --seq-len 64 --quiet",
        f"sensitivity {out} --model {model} --dataset {text} --windows 1 --seq-len 64 --quiet",
        f"sweep {model} --recipe rtn --dataset {text} --windows 1 --seq-len 64 --out {tmp_path / 'sweep'} --quiet",
        f"export {out} --dequantize --out {tmp_path / 'plain'} --quiet",
        f"report {out} --quiet",
        f"roofline {model}",
        f"profile --tiny --tokens 8 --steps 1 --repetitions 1 --out {tmp_path / 'profile'} --quiet",
        "bench --what ops --shapes 1x64x64 --repetitions 1 --warmup 0 --quiet",
        "doctor",
    ]
    assert {verb.split()[0] for verb in verbs} == {command.name for command in app.app.registered_commands}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    environment = {**clean, "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, " ; ".join(verbs)], capture_output=True, text=True, env=environment
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "attempts []", done.stdout[-2000:] + done.stderr[-2000:]
    names = {verb.split()[0] for verb in verbs}
    codes = [line for line in lines if line[:1].isdigit() and line.split()[-1] in names]
    assert len(codes) == len(verbs), done.stdout[-2000:] + done.stderr[-2000:]
    well = ("0 ", "1 verify", "1 doctor")
    assert all(line.startswith(well) for line in codes), done.stdout[-2000:] + done.stderr[-2000:]


def test_the_lock_is_whole() -> None:
    """Every package that pyproject.toml asks for is in the lock, in the version of constraints.txt; torch is apart."""

    def pinned(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        found = (re.match(r"([A-Za-z0-9._-]+)==([^\s]+)", line) for line in lines)
        return {canonical(match[1]): match[2] for match in found if match}

    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, wanted, names = project["optional-dependencies"], list(project["dependencies"]), ["dev"]
    for name in names:
        for requirement in extras[name]:
            own = re.fullmatch(r"omniw4\[(.*)\]", requirement)
            names += own[1].split(",") if own else []
            wanted += [] if own else [requirement]
    lock, constraints = pinned("requirements-ci.txt"), pinned("constraints.txt")
    asked = {canonical(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in wanted}  # type: ignore[index]
    assert asked - set(lock) == {"torch"}, "run make lock"
    assert {name: version for name, version in lock.items() if constraints.get(name) != version} == {}
    lines = [line for line in (ROOT / "requirements-ci.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in lines)
