"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from omniw4 import config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_docs", ROOT / "scripts" / "make_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cli_page_is_current(generator: ModuleType) -> None:
    old = generator.PAGE.read_text(encoding="utf-8")
    assert generator.page(old) == old, "run `make docs`"


def test_every_option_has_a_help_text(generator: ModuleType) -> None:
    for verb, command in generator.verbs().items():
        assert command.help, verb
        for parameter in command.params:
            assert parameter.help, f"{verb} {parameter.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_shown_have_options_that_exist(page: Path, generator: ModuleType) -> None:
    """Every `omniw4 VERB --flag` of a page is one the program knows."""
    verbs = generator.verbs()
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for verb, rest in re.findall(r"omniw4 ([a-z]+)\b([^`\n]*)", text):
        if verb not in verbs:
            continue
        known = {flag for p in verbs[verb].params for flag in p.opts} | {"--help"}
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))
        assert used <= known, f"{page.name}: omniw4 {verb} has no {used - known}"


def test_make_targets_named_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for line in re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert line in targets, f"{page.name}: make {line}"


def test_recipes_page_names_every_shipped_config() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for path in config.config_dir().glob("*.yaml"):
        assert f"| `{path.stem}` |" in text
