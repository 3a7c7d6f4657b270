"""Mutation testing of the modules whose faults nobody would see: each small change of the code must fail a test.

    python scripts/mutants.py                        all modules; most of an hour
    python scripts/mutants.py int4.py --only 12      one mutant, with what the tests print

A mutant changes one operator, constant, condition, raise or return. It lives in a process forked from one that has
imported torch and transformers, in which the module is imported with the change, and dies with the first test that
fails, or with a size so wrong that a gigabyte more does not hold it. The tests are run on the unchanged module first:
where they fail anyway, no mutant's death would mean a thing. The survivors are printed; docs/reliability.md argues
each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = [
    "tests/repack/test_repack_words.py",
    "tests/repack/test_repack_activations.py",
    "tests/repack/test_repack_layouts.py",
    "tests/repack/test_repack_integer.py",
    "tests/repack/test_repack_refusals.py",
    "tests/repack/test_repack_fragments.py",
    "tests/property/test_property_repack.py",
    "tests/repack/test_repack_cache.py",
]
CACHE = [
    "tests/repack/test_repack_words.py",
    "tests/repack/test_repack_cache.py",
    "tests/repack/test_repack_refusals.py",
]
CHECKPOINT = [
    "tests/checkpoint/hostile/test_hostile_checkpoints.py",
    "tests/checkpoint/hostile/test_what_is_listed.py",
    "tests/checkpoint/test_checkpoint_writer.py",
    "tests/checkpoint/test_checkpoint_replaced.py",
]
TESTS = {  # module -> tests that must notice, the quickest first
    "int4.py": ["tests/test_int4.py", "tests/property/test_property_int4.py", "tests/ops/test_quantize_lora_down.py"],
    "checkpoint/validate.py": CHECKPOINT,
    "repack/axes.py": LAYOUTS,
    "repack/operands.py": LAYOUTS,
    "repack/widened.py": LAYOUTS,
    "repack/mma_s4.py": LAYOUTS,
    "repack/mma_s8.py": LAYOUTS,
    "repack/wgmma_s8.py": LAYOUTS,
    "repack/layouts.py": LAYOUTS,
    "repack/cache_header.py": CACHE,
    "repack/cache.py": CACHE,
}
SECONDS = 120  # a mutant that takes longer is dead: it hangs
MORE_MEMORY = 1 << 30  # bytes of address space beyond what all mutants share; the unchanged modules need less
SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
    **{ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    number: int
    line: int
    change: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    sites = sorted(_sites(tree), key=lambda site: site[0])
    for number, (_, path, change) in enumerate(sites):
        changed = copy.deepcopy(tree)
        node, field, index = _find(changed, path)
        told, line = _apply(node, field, index, change)
        yield Mutant(number, line, told, ast.fix_missing_locations(changed))


Way = tuple[tuple[str, int | None], ...]


def _sites(node: ast.AST, path: Way = (), line: int = 0) -> Iterator[tuple[tuple[int, int], Way, str]]:
    """(line, column), the way to a node and what to do with it; messages, annotations and docstrings are left alone."""
    at = (getattr(node, "lineno", line), getattr(node, "col_offset", 0))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield at, path, "compare"
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS and not _is_union(node):
        yield at, path, "operator"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield at, path, "unary"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield at, path, "constant"
    elif isinstance(node, ast.Raise):
        yield at, path, "raise"
        return
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield at, path, "return"
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, ast.AST):
                step = (field, index if isinstance(value, list) else None)
                yield from _sites(child, (*path, step), at[0])


def _is_union(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and "None" in ast.unparse(node) and isinstance(node.op, ast.BitOr)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _find(tree: ast.AST, path: Way) -> tuple[Any, str, int | None]:
    """The parent of a node, and where in it the node is."""
    parent: Any = tree
    for field, index in path[:-1]:
        parent = getattr(parent, field) if index is None else getattr(parent, field)[index]
    return parent, *path[-1]


def _apply(parent: Any, field: str, index: int | None, change: str) -> tuple[str, int]:
    node = getattr(parent, field) if index is None else getattr(parent, field)[index]
    before = ast.unparse(node)
    new: Any = node
    if change == "compare":
        node.ops = [SWAPS[type(node.ops[0])]()]
    elif change == "operator":
        node.op = SWAPS[type(node.op)]()
    elif change == "unary":
        new = node.operand
    elif change == "constant":
        new = ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif change == "raise":
        new = ast.Pass()
    elif change == "return":
        new = ast.Return(ast.Constant(None))
    ast.copy_location(new, node)
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    return f"{before.splitlines()[0][:70]}  ->  {ast.unparse(new).splitlines()[0][:70]}", node.lineno


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from the mutant's code."""

    tree: ast.Module

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.tree, self.path)  # type: ignore[arg-type]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self.name, self.loader = name, _Loader(name, str(file))
        self.loader.tree = tree

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.loader.path, loader=self.loader)


def survives(module: str, tree: ast.Module, *, show: bool = False) -> bool:
    """Run the tests on a module in a forked process; True when none fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(SECONDS)
            if not show:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
            file = ROOT / "src" / "omniw4" / module
            name = "omniw4." + module.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(0, _Finder(name, file, tree))
            status = _run_tests([str(ROOT / test) for test in TESTS[module]], show)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _run_tests(tests: list[str], show: bool) -> int:
    """Exit status of the first file of tests that fails, or 0."""
    import pytest
    from hypothesis import Phase, settings

    # That an example fails is enough; its smallest form is searched for in vain, and for minutes.
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")
    shared = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (shared + MORE_MEMORY,) * 2)
    told = [] if show else ["--tb=no", "--assert=plain"]
    for test in tests:  # one after the other: most mutants die before the second file is even imported
        if status := int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *told, test])):
            return status
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], help="modules below src/omniw4 (all)")
    parser.add_argument("--only", type=int, default=None, help="one mutant, shown")
    parser.add_argument("--json", type=Path, default=None, help="write what was found here, after each module")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path[:0] = [str(ROOT / "src")]
    import hypothesis  # noqa: F401  # what every mutant needs, imported once
    import safetensors.torch  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for module in options.modules or TESTS:
        source = (ROOT / "src" / "omniw4" / module).read_text(encoding="utf-8")
        every = list(mutants(source))
        if not survives(module, ast.parse(source)):
            print(f"{module}: the tests fail on the unchanged module", file=sys.stderr)
            return 1
        if options.only is not None:
            print(every[options.only].line, every[options.only].change)
            print("survives" if survives(module, every[options.only].tree, show=True) else "dies")
            return 0
        alive, began = [], time.monotonic()
        for mutant in every:
            if survives(module, mutant.tree):
                alive.append(mutant)
                print(f"{module}:{mutant.line}: #{mutant.number} {mutant.change}", flush=True)
        seconds = time.monotonic() - began
        print(f"{module}: {len(every)} mutants, {len(alive)} survive, {seconds:.0f} s", flush=True)
        told = [{k: v for k, v in asdict(m).items() if k != "tree"} for m in alive]
        found[module] = {"mutants": len(every), "survivors": told}
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
