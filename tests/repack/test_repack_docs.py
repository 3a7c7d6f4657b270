"""docs/mma-layouts.md draws the fragments as the simulator has them, and states the layouts as the code has them."""

from pathlib import Path

import pytest
from fragment_pictures import PICTURES
from linear_samples import random_linear

from omniw4 import repack

DOCS = Path(__file__).resolve().parents[2] / "docs" / "mma-layouts.md"


@pytest.mark.parametrize("title", PICTURES)
def test_picture_in_the_docs_is_that_of_the_table(title: str) -> None:
    assert PICTURES[title]() in DOCS.read_text(encoding="utf-8"), f"draw anew:\n{PICTURES[title]()}"


@pytest.mark.parametrize("name", sorted(repack.LAYOUTS))
def test_docs_state_version_tile_and_shapes(name: str) -> None:
    layout, text = repack.get(name), DOCS.read_text(encoding="utf-8")
    packed = layout.pack(random_linear(2 * layout.N_TILE, 64, 16))
    rows = packed["qweight"].shape[0] // 2
    block = 2 * layout.N_TILE // packed["qweight"].shape[0]
    tail = ", ".join(map(str, packed["qweight"].shape[2:]))
    scales_tail = ", ".join(map(str, packed["w_scales"].shape[2:]))
    assert rows * block == layout.N_TILE
    shapes = f"`[N'/{block}, K/64, {tail}]` | `[N'/{block}, K/64, {scales_tail}]`"
    row = f"| `{name}` | {layout.VERSION} | {layout.N_TILE} | {shapes} |"
    assert row in text, f"missing row: {row}"
