"""The picture of the README shows what docs/results.md says."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "scripts" / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_current(generator: ModuleType) -> None:
    table = generator.rows(generator.TABLE.read_text(encoding="utf-8"))
    assert generator.PICTURE.read_text(encoding="utf-8") == generator.picture(table), "run `make docs`"


def test_bars_are_as_long_as_their_figures(generator: ModuleType) -> None:
    page = "| recipe | text | reference | quantized | ratio | KL |\n|---|\n" + "".join(
        f"| {recipe} | {text} | 10.0 | 12.0 | {ratio} | 0.1 |\n"
        for recipe, text, ratio in (("a<b", "x", 1.5), ("a<b", "y", 2.0), ("good", "x", 1.25))
    )
    table = generator.rows(page)
    assert table == {"a<b": {"x": 1.5, "y": 2.0}, "good": {"x": 1.25}}
    root = ElementTree.fromstring(generator.picture(table))
    svg = "{http://www.w3.org/2000/svg}"
    widths = [float(rect.get("width", 0)) for rect in root.iter(f"{svg}rect") if rect.get("x") == str(generator.LEFT)]
    assert widths == [pytest.approx(widths[2] / 4, abs=0.1), pytest.approx(widths[2] / 2, abs=0.1), widths[2]]
    page = next(root.iter(f"{svg}rect"))
    assert ["0", "0", page.get("width"), page.get("height")] == root.get("viewBox", "").split(), (
        "text on a page of its own"
    )
    assert root.findtext(f"{svg}style", "").count(".page { fill: ") == 2, "light and dark, as the text"
    told = [text.text for text in root.iter(f"{svg}text")]
    assert {"1.500", "2.000", "1.250", "a<b", "good"} <= set(told)


def test_a_page_without_the_table_is_refused(generator: ModuleType) -> None:
    with pytest.raises(SystemExit, match="has no table"):
        generator.rows("| a | b |\n")
