"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
import sys
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


def test_the_landing_page_shows_the_table_that_the_quickstart_prints() -> None:
    """Its columns, and a row for each recipe and text; the figures are of the machine that took them."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = quickstart  # dataclasses look their module up
    spec.loader.exec_module(quickstart)
    scale = quickstart.NORMAL
    verdict = {
        "perplexity": {"reference": 1.0, "quantized": 1.0, "ratio": 1.0},
        **{"kl": 0.0, "argmax_agreement": 1.0, "effective_bits": 5.0},
    }
    verdicts = {recipe: [verdict] * len(scale.texts) for recipe in scale.recipes}
    printed = quickstart.closing_table(scale, verdicts, dict.fromkeys(scale.recipes, 1.0)).strip()
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    title, _, header, _, *rows = printed.splitlines()
    assert title in shown
    assert re.split(r"\s{2,}", header) in [re.split(r"\s{2,}", line) for line in shown.splitlines()]
    for row in rows:
        recipe, text = re.split(r"\s{2,}", row)[:2]
        assert re.search(rf"^{re.escape(recipe)}\s+{re.escape(text)}\s+\d", shown, re.MULTILINE), (recipe, text)
