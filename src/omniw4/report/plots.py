"""Plots as inline SVG that takes its colours and its font from the page, light or dark."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from typing import Any

from omniw4.errors import UsageError

# drawn in these colours, which become the page's variables; CSS cannot reach into matplotlib
_VARIABLES = {
    "#010101": "var(--text)", "#020202": "var(--grid)", "#030303": "var(--muted)",
    **{f"#0a0a{i:02x}": f"var(--series-{i})" for i in range(8)},
}  # fmt: skip
_TEXT, _GRID, _MUTED = "#010101", "#020202", "#030303"
SERIES = [colour for colour in _VARIABLES if colour.startswith("#0a0a")]
_BLOCK = re.compile(r"\.(\d+)\.")


def require() -> Any:
    """matplotlib, set up for figures without a screen.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
        from matplotlib import figure
    except ImportError as e:
        raise UsageError(
            f"the plots of a report need matplotlib, which cannot be imported: {e}",
            hint="pip install 'omniw4[report]', or leave the plots out with --no-plots",
        ) from e
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache the first time
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none", "svg.hashsalt": "omniw4", "font.family": "sans-serif", "font.size": 9,
            "text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT,
            "axes.edgecolor": _MUTED, "grid.color": _GRID, "axes.grid": True, "axes.axisbelow": True,
            "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        }
    )  # fmt: skip
    return figure


def errors_by_block(layers: Sequence[dict[str, Any]]) -> str:
    """Relative output error of every linear over its block, a line a role; held-out where it was measured."""
    held_out = any(row["held_out_error"] for row in layers)
    key = "held_out_error" if held_out else "relative_error"
    figure, axes = _axes()
    for index, (role, rows) in enumerate(_by_role(layers).items()):
        points = [(block, row[key]) for block, row in rows if row[key]]
        if points:
            style = {"marker": "oXsDv^P"[index % 7], "markersize": 3.5, "linewidth": 1}
            axes.plot(*zip(*points, strict=True), color=SERIES[index % len(SERIES)], label=role, **style)
    axes.set_yscale("log")
    axes.set_xlabel("block")
    axes.set_ylabel("‖ŷ − y‖² / ‖y‖²")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.has_data():
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    what = "held-out inputs, activations quantized" if held_out else "calibration statistics, weights alone"
    return _svg(figure, f"Relative error of every linear by block, on {what}")


def gain_over_data_free(layers: Sequence[dict[str, Any]]) -> str:
    """Every linear's calibrated error against that of the data-free recipe; below the diagonal calibration helped."""
    figure, axes = _axes()
    ends: list[float] = []
    for index, (role, rows) in enumerate(_by_role(layers).items()):
        points = [
            (row["data_free_error"], row["relative_error"])
            for _, row in rows
            if row["data_free_error"] and row["relative_error"]
        ]
        if points:
            ends += [value for point in points for value in point]
            axes.scatter(*zip(*points, strict=True), s=12, color=SERIES[index % len(SERIES)], label=role)
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=_MUTED, linewidth=1, linestyle="--")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("error of the data-free recipe")
    axes.set_ylabel("error of this recipe")
    return _svg(figure, "Weight error of every linear against the data-free recipe")


def energy_by_block(layers: Sequence[dict[str, Any]]) -> str:
    """Share of what the codes miss that the low-rank branch holds, over the block."""
    figure, axes = _axes()
    for index, (role, rows) in enumerate(_by_role(layers).items()):
        points = [(block, row["rank_energy"]) for block, row in rows if row["rank"] and row["rank_energy"] is not None]
        if points:
            style = {"marker": "oXsDv^P"[index % 7], "markersize": 3.5, "linewidth": 1}
            axes.plot(*zip(*points, strict=True), color=SERIES[index % len(SERIES)], label=role, **style)
    axes.set_ylim(0, 1)
    axes.set_xlabel("block")
    axes.set_ylabel("share of ‖W − Q‖²")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.has_data():
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return _svg(figure, "Share of the residual's energy that the low-rank branch holds, by block")


def distillation(log: Sequence[dict[str, Any]], kind: str) -> str:
    """Training and held-out loss over the steps; the best held-out state is what the checkpoint holds."""
    figure, axes = _axes()
    for index, (key, label) in enumerate((("loss", "training"), ("held_out", "held out"))):
        points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=SERIES[index], marker="os"[index], markersize=3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("KL, nats a token" if kind == "logits" else "relative error")
    if axes.has_data():
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return _svg(figure, "Loss of the distillation over its steps")


def sizes(parts: dict[str, int], original: int) -> str:
    """What the quantized linears take, by part, under what they took in 16 bits."""
    figure, axes = _axes(height=1.9)
    mib = 1 << 20
    axes.barh(["16 bits"], [original / mib], color=_MUTED)
    left = 0.0
    for index, (name, count) in enumerate(parts.items()):
        if count:
            axes.barh(["quantized"], [count / mib], left=left, color=SERIES[index], label=name)
            left += count / mib
    axes.set_xlabel("MiB")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return _svg(figure, "Size of the quantized linears by part, against 16 bits")


def breakdown(engines: Sequence[dict[str, Any]]) -> str:
    """Milliseconds a step by kind of kernel, a bar an engine, idle time at the end."""
    figure, axes = _axes(height=1.2 + 0.4 * len(engines))
    kinds = list(dict.fromkeys(row["kind"] for engine in engines for row in engine["breakdown"]))
    for engine in engines:
        left = 0.0
        times = {row["kind"]: row["ms"] for row in engine["breakdown"]}
        for index, kind in enumerate(kinds):
            axes.barh([engine["name"]], [times.get(kind, 0.0)], left=left, color=SERIES[index % 8], label=kind)
            left += times.get(kind, 0.0)
        axes.barh([engine["name"]], [engine["idle_ms"]], left=left, color=_GRID, label="idle")
    axes.set_xlabel("ms a step")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return _svg(figure, "Time of a step by kind of kernel")


def pareto(points: Sequence[tuple[str, str, float | None, float | None]], title: str, cost: str, score: str) -> str:
    """Score over cost, a colour for each width of the activations.

    Args:
        points: (label, activations, cost, score); points without a number are left out.
        title: of the figure, another for each of a page.
        cost, score: names of the axes, with units.
    """
    figure, axes = _axes(height=3.6)
    widths = list(dict.fromkeys(activations for _, activations, _, _ in points))
    for label, activations, x, value in points:
        if x is None or value is None:
            continue
        index = widths.index(activations)
        axes.scatter([x], [value], s=22, color=SERIES[index % len(SERIES)], label=activations)
        axes.annotate(label, (x, value), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_yscale("log")
    axes.set_xlabel(cost)
    axes.set_ylabel(score)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return _svg(figure, title)


def role_of(path: str) -> tuple[str, int]:
    """``model.layers.3.mlp.up_proj`` to ``("up_proj", 3)``."""
    match = _BLOCK.search(path)
    return path.rpartition(".")[2], int(match[1]) if match else 0


def _by_role(layers: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    roles: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in layers:
        role, block = role_of(row["path"])
        roles.setdefault(role, []).append((block, row))
    return {role: sorted(rows, key=lambda pair: pair[0]) for role, rows in roles.items()}


def _axes(height: float = 3.2) -> tuple[Any, Any]:
    figure = require().Figure(figsize=(5.2, height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    return figure, axes


def _svg(figure: Any, label: str) -> str:
    """The figure as an ``<svg>`` element: the page's colours, names that clash with no other figure of the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    prefix = re.sub(r"\W+", "-", label.lower())[:24]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px; font-family: inherit", text)
    opening = rf'<svg role="img" aria-label="{label}" viewBox="\1" xmlns:xlink="http://www.w3.org/1999/xlink">'
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', opening, text, count=1)
    return text.strip()
