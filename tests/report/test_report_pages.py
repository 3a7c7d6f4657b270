"""What a report's pages say, that nothing in a document can break them, and which files they replace."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from omniw4 import report
from omniw4.errors import OutputExistsError, StorageError, UsageError
from omniw4.report import html, markdown, plots


def test_the_three_files_say_the_same(document: dict[str, Any], tmp_path: Path) -> None:
    out = report.write(document, tmp_path / "report")
    assert json.loads((out / "report.json").read_text()) == document
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for figure in ("×1.227", "0.240", "76.2%", "this checkpoint", "rtn", "0.03100", "max_kl", "hadamard64"):
        assert figure in page
        assert figure in text.replace("\\", "")


def test_the_page_is_well_formed_and_escaped(document: dict[str, Any]) -> None:
    page = html.page(document)
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    root = ElementTree.fromstring(body)  # every tag closed, every ampersand escaped
    assert "".join(root.find("h1").itertext()) == f"a<b>&'c'|d_e_ · {document['model']}"  # type: ignore[union-attr]
    assert "too <much>" in "".join(root.itertext())
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) + len(list(root.iter("svg"))) >= 3


def test_the_page_fetches_nothing_and_runs_nothing(document: dict[str, Any]) -> None:
    page = html.page(document)
    assert "<script" not in page
    assert not re.search(r"\son\w+=", page)
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_plots_take_the_page_s_colours_and_share_no_names(document: dict[str, Any]) -> None:
    page = html.page(document)
    drawn = page[page.index("</style>") :]
    svgs = re.findall(r"<svg.*?</svg>", drawn, re.DOTALL)
    assert not [colour for svg in svgs for colour in re.findall(r"#(?:0[1-3]){3}|#0a0a\w\w", svg)]
    assert "var(--series-0)" in drawn
    assert "var(--text)" in drawn
    names = re.findall(r'\bid="([^"]+)"', drawn)
    assert len(names) == len(set(names))
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', drawn))
    assert used <= set(names)
    defined = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= defined


def test_the_same_document_gives_the_same_bytes(document: dict[str, Any]) -> None:
    assert html.page(document) == html.page(document)


def test_bytes_by_part_are_all_the_bytes(document: dict[str, Any]) -> None:
    sizes = document["sizes"]
    assert sum(sizes["parts"].values()) == sizes["quantized_bytes"]
    assert sizes["quantized_bytes"] + sizes["other_bytes"] <= sizes["total_bytes"]


def test_the_worst_linear_is_chosen_on_held_out_inputs(document: dict[str, Any], folder: Path) -> None:
    assert document["worst"][0]["path"] == "model.layers.0.mlp.up_proj"
    assert document["worst"][0]["held_out_error"] == 0.031
    without = report.collect(folder)
    assert without["passed"] is None
    assert without["quality"] == []
    assert "Quality" not in html.page(without, with_plots=False)


def test_without_matplotlib_the_error_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        report.write(document, tmp_path / "report")
    assert "--no-plots" in caught.value.hint
    assert not (tmp_path / "report").exists()
    report.write(document, tmp_path / "report", with_plots=False)


def test_only_the_report_s_own_files_are_replaced(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine" / "src").mkdir(parents=True)
    others = [tmp_path / "mine" / "thesis.tex", tmp_path / "mine" / "src" / "main.py"]
    for file in others:
        file.write_text("x")
    for name in ("first", "second"):
        report.write({**document, "name": name}, tmp_path / "mine", with_plots=False)
        assert all(file.read_text() == "x" for file in others)
        assert all(name in (tmp_path / "mine" / f"report.{kind}").read_text() for kind in ("html", "json", "md"))
    names = {entry.name for entry in (tmp_path / "mine").iterdir()}
    assert names == {"thesis.tex", "src", "report.html", "report.json", "report.md"}


@pytest.mark.parametrize(
    ("name", "content"), [("report.json", '{"coverage": 1}'), ("report.json", "x"), ("report.md", "# My thesis")]
)
def test_somebody_else_s_file_of_the_same_name_stays(
    document: dict[str, Any], tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(OutputExistsError, match=f"{name}' is of no earlier result"):
        report.write(document, tmp_path, with_plots=False)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


def test_a_report_that_was_interrupted_is_replaced(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of its files were written."""
    real = os.replace
    for allowed in range(3):
        out = tmp_path / str(allowed)
        done: list[object] = []

        def replace(source: Any, target: Any, done: list[object] = done, allowed: int = allowed) -> None:
            if len(done) == allowed:
                raise OSError(28, "No space left on device")
            done.append(target)
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(StorageError, match="No space left"):
                report.write(document, out, with_plots=False)
        assert len(list(out.iterdir())) == allowed, "no temporary file stays"
        report.write(document, out, with_plots=False)
        assert len(list(out.iterdir())) == 3


def test_markdown_tables_have_equal_rows(document: dict[str, Any]) -> None:
    columns = 0
    for line in markdown.page(document).splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert columns in (0, cells), line
        columns = cells


def test_a_linear_without_a_block_number_has_a_role() -> None:
    assert plots.role_of("model.layers.11.mlp.up_proj") == ("up_proj", 11)
    assert plots.role_of("lm_head") == ("lm_head", 0)


def test_engines_of_a_benchmark_are_a_table(document: dict[str, Any]) -> None:
    timing = {"median_us": 1250.0, "std_us": 20.0}
    row = {"engine": "w4a4", "tokens": 704, "timing": timing, "speedups": {"hf-eager": 17.5}, "weight_bytes": 1 << 28,
           "attention": "flash"}  # fmt: skip
    untimed = {**row, "engine": "fp8", "timing": None, "speedups": {}, "weight_bytes": None, "attention": ""}
    voice = {"engine": "fp16", "batch": 8, "mean_rtf": 0.0168, "speedup": 11.27, "memory_bytes": 3 << 30}
    parts = {"ops": [], "model": [], "backbone": [row, untimed], "omnivoice": [voice]}
    bench = {"environment": {"device": "a GPU"}, "notes": ["a note"], **parts}
    text = markdown.page({**document, "bench": bench})
    assert "| w4a4 | 704 | 1.25 | 0.02 | 17.50× | 256.0 MiB | flash |" in text
    assert "| fp8 | 704 | – | – | – | – | – |" in text
    assert "| fp16 | 8 | 0.0168 | 11.27× | 3.00 GiB |" in text
    assert "Steps of the backbone" in html.page({**document, "bench": bench}, with_plots=False)


def test_references_timed_on_a_cpu_are_folded(document: dict[str, Any]) -> None:
    op = {"op": "gemm_w4a4", "m": 1, "n": 64, "k": 64, "timing": None, "tops": None, "gbs": None, "roofline": None,
          "vs_fp16": None}  # fmt: skip
    for rows, device, folded in (
        ([op], "cpu", "All 1 op, the references on a CPU"), ([op, op], "cpu", "All 2 ops, the references on a CPU"),
        ([op], "cuda", ""),
    ):  # fmt: skip
        bench = {"environment": {"device": "x", "device_type": device}, "ops": rows, "notes": []}
        page = html.page({**document, "bench": bench}, with_plots=False)
        assert page.count("<details>") == 1 + bool(folded)
        assert (f"<summary>{folded}</summary>" in page) == bool(folded)
        assert ("<h3>Ops</h3>" in page) != bool(folded)
        assert page.count("<td>gemm_w4a4</td>") == len(rows)


def test_one_linear_is_singular(document: dict[str, Any]) -> None:
    settings = [{**document["settings"][0], "linears": 1}]
    one = {**document, "layers": document["layers"][:1], "settings": settings, "skipped": {"lm_head": "asked"}}
    for page in (html.page(one, with_plots=False), markdown.page(one)):
        assert "1 linear quantized" in page
        assert "1 linears" not in page
        assert page.count("1 linear") >= 3
    many = markdown.page(document)
    assert f"{len(document['layers'])} linears quantized" in many


def test_a_searched_smoothing_has_a_column_and_no_other_has(document: dict[str, Any]) -> None:
    searched = {**document, "layers": [{**row, "smooth_strength": 0.7} for row in document["layers"]]}
    for page in (html.page, markdown.page):
        assert "smoothing</th>" in page(searched) or "| smoothing |" in page(searched)
        assert "smoothing</th>" not in page(document)
        assert "| smoothing |" not in page(document)


def test_a_distillation_is_told_and_drawn(document: dict[str, Any]) -> None:
    log = [{"step": 0, "loss": None, "held_out": 0.5}, {"step": 20, "loss": 0.4, "held_out": 0.25}]
    record = {"kind": "logits", "steps": 40, "best_step": 20, "held_out_before": 0.5, "held_out_best": 0.25, "log": log}
    provenance = {**document["provenance"], "distillation": {"data": {"dataset": "words.txt"}, "report": record}}
    distilled = {**document, "provenance": provenance}
    told = "20 of 40 steps on words.txt; held-out loss 0.5000 to 0.2500"
    assert told in html.page(distilled)
    assert told in markdown.page(distilled)
    assert html.page(distilled).count("<svg") == html.page(document).count("<svg") + 1
    assert "distilled" not in markdown.page(document)
