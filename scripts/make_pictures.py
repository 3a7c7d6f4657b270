"""Draw the picture of the README from the first table of docs/results.md; ``--check`` only compares.

python scripts/make_pictures.py [--check]

Written out by hand, not by a plotting library: the same table gives the same bytes with any version of anything, and
the picture follows the reader's light or dark setting.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE, PICTURE = DOCS / "results.md", DOCS / "images" / "quality.svg"
TITLE = "Perplexity over the unquantized model's: SmolLM2-135M, all 210 linears, about 5 bits a weight"
WIDTH, LEFT, RIGHT, ROW, GAP, TOP = 860, 250, 60, 20, 12, 56
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1c1d1f }
  .page { fill: #ffffff }
  .title { font-size: 15px; font-weight: 600 } .muted { fill: #6a6d73 } .axis { stroke: #6a6d73 }
  .text0 { fill: #2b5fd0 } .text1 { fill: #d9622b }
  @media (prefers-color-scheme: dark) {
    .page { fill: #17181a }
    text { fill: #e7e8ea } .muted { fill: #9a9da4 } .text0 { fill: #7aa2ff } .text1 { fill: #ff9d66 }
  }
"""
_ROW = re.compile(r"^\| ([^|]+?) \| ([^|]+?) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", re.MULTILINE)


def rows(page: str) -> dict[str, dict[str, float]]:
    """recipe -> text -> ratio, of the first table of the page that has such rows."""
    found: dict[str, dict[str, float]] = {}
    start = _ROW.search(page)
    if start is None:
        raise SystemExit(f"error: {TABLE.name} has no table of recipe, text, reference, quantized, ratio")
    table = page[start.start() :].partition("\n\n")[0]
    for recipe, text, ratio in _ROW.findall(table):
        found.setdefault(recipe, {})[text] = float(ratio)
    return found


def picture(table: dict[str, dict[str, float]]) -> str:
    """Bars from 1, a pair a recipe, the best first."""
    texts = list(dict.fromkeys(text for ratios in table.values() for text in ratios))
    recipes = sorted(table, key=lambda recipe: min(table[recipe].values()))
    longest = max(ratio for ratios in table.values() for ratio in ratios.values())
    scale = (WIDTH - LEFT - RIGHT) / (longest - 1)
    height = TOP + len(recipes) * (len(texts) * ROW + GAP) + 8
    label = escape(TITLE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="8" y="20">{label}</text>',
    ]
    at = 8.0
    for index, text in enumerate(texts):
        parts.append(f'<rect class="text{index}" x="{at:.0f}" y="32" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="muted" x="{at + 16:.0f}" y="42">{escape(text)}</text>')
        at += 40 + 7.2 * len(text)
    parts.append(f'<text class="muted" x="{at:.0f}" y="42">1 = as good as the original</text>')
    y = TOP
    for recipe in recipes:
        middle = y + len(texts) * ROW / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(recipe)}</text>')
        for index, text in enumerate(texts):
            if (ratio := table[recipe].get(text)) is not None:
                length = max(1.0, (ratio - 1) * scale)
                parts.append(
                    f'<rect class="text{index}" x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 4}" rx="2"/>'
                    f'<text x="{LEFT + length + 6:.1f}" y="{y + ROW - 6}">{ratio:.3f}</text>'
                )
            y += ROW
        y += GAP
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP - 4}" y2="{height - 12}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    new = picture(rows(TABLE.read_text(encoding="utf-8")))
    if "--check" in sys.argv[1:]:
        old = PICTURE.read_text(encoding="utf-8") if PICTURE.is_file() else ""
        if new != old:
            print(f"error: {PICTURE.name} is not what {TABLE.name} says\n\nhint: make docs", file=sys.stderr)
        return int(new != old)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
