"""What a report says, from documents that are made up, and that nothing in it can break the page."""

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
from omniw4.report import html, markdown, plots, results
from omniw4.tensors import LinearSpec
from tiny_models import qwen3, write_checkpoint

VERDICT: dict[str, Any] = {
    "passed": False,
    "gates": [
        {"name": "max_kl", "passed": False, "value": 0.3, "relation": "<=", "limit": 0.1, "detail": "too <much>"}
    ],
    "layers": [{"path": "model.layers.0.mlp.up_proj", "relative_error": 0.031, "sqnr_db": 15.1}],
    "perplexity": {"reference": 13.89, "quantized": 17.04, "ratio": 1.2268, "reason": ""},
    "kl": 0.24, "argmax_agreement": 0.762, "effective_bits": 5.01, "device": "cpu", "path": "reference",
    "dtype": "float32", "warnings": ["BOS <differs> & more"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose name is hostile to HTML and Markdown."""
    work = tmp_path_factory.mktemp("report")
    write_checkpoint(qwen3(), work, LinearSpec(rank=8))
    return (work / "checkpoint").rename(work / "a<b>&'c'|d_e_")


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("results") / "verify.json"
    file.write_text(json.dumps(VERDICT), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def document(folder: Path, verdict: Path) -> dict[str, Any]:
    return report.collect(folder, [str(verdict), f"rtn={verdict}"])


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


def test_the_report_says_what_was_measured(folder: Path, tmp_path: Path) -> None:
    windows = {"dataset": "wiki|text.txt", "count": 3, "seq_len": 48, "ids_sha256": "a" * 64, "held_out": True}
    source = report.collect(folder)["provenance"]["source"]
    verdict = {**VERDICT, "windows": windows, "model": source, "date": "2026-11-30T19:00:00+00:00"}
    other = {**verdict, "windows": {**windows, "count": 2, "ids_sha256": "b" * 64}}
    for name, content in (("verify", verdict), ("other", other), ("old", VERDICT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    document = report.collect(folder, [str(tmp_path / "verify.json"), f"few={tmp_path / 'other.json'}"])
    for page in (html.page(document, with_plots=False), markdown.page(document).replace("\\", "")):
        assert f"Quality measured: {source['name']} on wiki|text.txt, 3 windows × 48 tokens, 2026-11-30" in page
        assert f"Not comparable, on other tokens: few ({source['name']} on wiki|text.txt, 2 windows × 48 tokens" in page
    same = report.collect(folder, [str(tmp_path / "verify.json"), f"same={tmp_path / 'verify.json'}"])
    assert "Not comparable" not in markdown.page(same)
    old = markdown.page(report.collect(folder, [str(tmp_path / "old.json")]))
    assert "model not recorded on a text not recorded, date not recorded" in old


HOLDS = {"name": "hashes", "passed": True, "value": True, "relation": "==", "limit": True, "detail": ""}
MET = {"name": "max_kl", "passed": True, "value": 0.25, "relation": "<=", "limit": 0.5, "detail": ""}


@pytest.mark.parametrize(
    ("gates", "passed", "colour", "words"),
    [
        ([HOLDS], True, "warn", "passed (no quality gate was set)"), ([HOLDS, MET], True, "good", "passed"),
        ([{**HOLDS, "passed": False, "value": False}, MET], False, "bad", "failed"),
    ],
)  # fmt: skip
def test_a_verdict_without_a_quality_gate_is_not_green(
    folder: Path, tmp_path: Path, gates: list[Any], passed: bool, colour: str, words: str
) -> None:
    file = tmp_path / "verify.json"
    file.write_text(json.dumps({**VERDICT, "gates": gates, "passed": passed}))
    document = report.collect(folder, [str(file)])
    page, text = html.page(document, with_plots=False), markdown.page(document)
    assert f'verification <b class="{colour}">{words}</b>' in page
    assert f"Verification: **{words}**." in text
    assert ("passed, none of quality" in text) == (gates == [HOLDS])


def test_gates_are_listed_with_their_limits(document: dict[str, Any]) -> None:
    gates = [HOLDS, MET, {**MET, "name": "max_layer_error", "passed": False, "value": None, "detail": "not measured"}]
    broken = {**HOLDS, "name": "finite_tensors", "passed": False, "value": False, "detail": "x: qweight"}
    text = markdown.page({**document, "gates": [*gates, broken]}).replace("\\", "")
    assert "| max_kl | 0.25 | <= 0.5 | passed |  |" in text
    assert "| max_layer_error | – | <= 0.5 | failed | not measured |" in text
    assert "| finite_tensors | – | holds | failed | x: qweight |" in text
    assert "Also checked, and true: hashes." in text
    assert "| of quality | – | none was set | – |  |" in markdown.page({**document, "gates": [HOLDS]})


def test_the_title_is_checkpoint_and_model(document: dict[str, Any]) -> None:
    name = {**document, "name": "out", "model": "tiny-qwen3"}
    assert "<title>out · tiny-qwen3 · omniw4 report</title>" in html.page(name, with_plots=False)
    assert markdown.page(name).startswith("# out · tiny-qwen3\n")


def test_whether_the_text_is_held_out_is_what_verify_found(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    warned = {**VERDICT, "warnings": ["'a' is the text of the calibration: these figures are not held-out; name ..."]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**VERDICT, "windows": {"held_out": True}}, "Perplexity on another text than the checkpoint was made with"),
        ({**VERDICT, "windows": {"held_out": False}}, "on the text the checkpoint was made with, so not held-out"),
        (warned, "on the text the checkpoint was made with, so not held-out"),
        (VERDICT, "on a text of which is not recorded"),
    ]
    for verdict, told in cases:
        file.write_text(json.dumps(verdict))
        found = report.collect(folder, [str(file)])
        for page in (html.page(found, with_plots=False), markdown.page(found)):
            assert told in page
            assert page.count("Perplexity on") == 1


def test_results_beside_the_checkpoint_are_found(folder: Path) -> None:
    (folder / "verify.json").write_text(json.dumps(VERDICT), encoding="utf-8")
    try:
        assert report.collect(folder)["passed"] is False
    finally:
        (folder / "verify.json").unlink()


def test_results_of_another_checkpoint_are_refused_by_name(
    folder: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "other.json"
    timed = {"environment": {}, "ops": [], "ceiling": None}
    for verdict, hint in ((VERDICT, f"NAME={file}"), (timed, "omniw4 bench")):
        file.write_text(json.dumps({**verdict, "hash": "f" * 64}))
        with pytest.raises(
            UsageError, match=f"other.json' are of another checkpoint: content hash {'f' * 16}"
        ) as caught:
            report.collect(folder, [str(file)])
        assert hint in caught.value.hint
        file.write_text(json.dumps({**verdict, "hash": document["hash"]}))
        assert report.collect(folder, [str(file)])["notes"] == []


def test_results_that_do_not_tell_their_checkpoint_are_noted(document: dict[str, Any]) -> None:
    assert document["notes"] == ["verify.json (verify) does not say which checkpoint it is of"]
    for page in (html.page(document, with_plots=False), markdown.page(document)):
        assert "verify.json (verify) does not say which checkpoint it is of" in page


def test_another_recipe_is_of_the_same_model(folder: Path, document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rtn.json"
    source = document["provenance"]["source"]
    file.write_text(json.dumps({**VERDICT, "hash": "f" * 64, "model": source}))
    assert report.collect(folder, [f"rtn={file}"])["quality"][0]["recipe"] == "rtn"
    file.write_text(json.dumps({**VERDICT, "model": {"name": "llama", "hash": "0" * 63}}))
    with pytest.raises(UsageError, match=f"'rtn' are of another model: 'llama', .* was made from '{source['name']}'"):
        report.collect(folder, [f"rtn={file}"])


def test_a_label_names_another_recipe(verdict: Path) -> None:
    assert (results.read(f"rtn={verdict}").label, results.read(str(verdict)).label) == ("rtn", "")
    odd = verdict.with_name("a=b.json")
    odd.write_text(json.dumps(VERDICT), encoding="utf-8")
    assert results.read(str(odd)).label == "", "a file whose name has an equals sign"


def test_no_result_hides_another(folder: Path, verdict: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"environment": {}, "ops": [], "ceiling": None}))
    for named, word in (
        ([str(verdict), str(verdict)], "both of verify of this checkpoint"),
        ([f"a={verdict}", f"a={verdict}"], "both of the recipe 'a'"),
        ([str(bench), str(verdict), str(bench)], "both of bench of this checkpoint"),
        ([f"={verdict}"], "have an empty name"),
        ([f" ={verdict}"], "have an empty name"),
    ):
        with pytest.raises(UsageError, match=word) as caught:
            report.collect(folder, named)
        assert caught.value.hint
    rows = report.collect(folder, [str(verdict), f"a={verdict}", f"b={verdict}"])["quality"]
    assert [row["recipe"] for row in rows] == ["", "a", "b"]


def test_a_named_verdict_takes_the_place_of_the_one_in_the_folder(folder: Path, verdict: Path) -> None:
    (folder / "verify.json").write_text(json.dumps({**VERDICT, "kl": 9.0}), encoding="utf-8")
    try:
        assert [row["kl"] for row in report.collect(folder, [str(verdict)])["quality"]] == [VERDICT["kl"]]
    finally:
        (folder / "verify.json").unlink()


@pytest.mark.parametrize(
    ("content", "word"), [("{", "are not JSON"), ("[]", "none of the verbs"), ('{"a": 1}', "none of the verbs")]
)
def test_results_that_are_none(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=word):
        results.read(str(tmp_path / "x.json"))
    with pytest.raises(UsageError, match="cannot read"):
        results.read(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("verify", {**VERDICT, "perplexity": 3.0}), ("verify", {**VERDICT, "layers": [{"path": "x"}]}),
        ("verify", {**VERDICT, "gates": ["all"]}),
        ("bench", {"environment": {}, "ops": [{"op": "x"}], "ceiling": None}),
        ("profile", {"environment": {}, "engines": [{"name": "x"}]}),
        ("roofline", {"gpu": {}, "rows": [{}], "total": {}}),
    ],
)  # fmt: skip
def test_results_of_another_version_are_refused(folder: Path, tmp_path: Path, kind: str, broken: Any) -> None:
    (tmp_path / "x.json").write_text(json.dumps(broken), encoding="utf-8")
    assert results.kind_of(broken) == kind
    with pytest.raises(UsageError, match=f"the results of {kind}") as caught:
        report.collect(folder, [str(tmp_path / "x.json")])
    assert "again with --json" in caught.value.hint


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
