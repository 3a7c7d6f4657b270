"""What a report takes from the results of other verbs, what it says of a verdict, and which results it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verdicts import VERDICT

from omniw4 import report
from omniw4.errors import UsageError
from omniw4.report import html, markdown, results


def test_the_report_says_what_was_measured(folder: Path, tmp_path: Path) -> None:
    windows = {"dataset": "wiki|text.txt", "count": 3, "seq_len": 48, "ids_sha256": "a" * 64, "held_out": True}
    source = report.collect(folder)["provenance"]["source"]
    verdict = {**VERDICT, "windows": windows, "model": source, "date": "2026-11-30T19:00:00+00:00"}
    other = {**verdict, "windows": {**windows, "count": 1, "ids_sha256": "b" * 64}}
    for name, content in (("verify", verdict), ("other", other), ("old", VERDICT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    document = report.collect(folder, [str(tmp_path / "verify.json"), f"few={tmp_path / 'other.json'}"])
    for page in (html.page(document, with_plots=False), markdown.page(document).replace("\\", "")):
        assert f"Quality measured: {source['name']} on wiki|text.txt, 3 windows × 48 tokens, 2026-11-30" in page
        assert f"Not comparable, on other tokens: few ({source['name']} on wiki|text.txt, 1 window × 48 tokens" in page
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
    assert ("passed, no quality gate" in text) == (gates == [HOLDS])


def test_gates_are_listed_with_their_limits(document: dict[str, Any]) -> None:
    gates = [HOLDS, MET, {**MET, "name": "max_layer_error", "passed": False, "value": None, "detail": "not measured"}]
    broken = {**HOLDS, "name": "finite_tensors", "passed": False, "value": False, "detail": "x: qweight"}
    text = markdown.page({**document, "gates": [*gates, broken]}).replace("\\", "")
    assert "| max_kl | 0.25 | <= 0.5 | passed |  |" in text
    assert "| max_layer_error | – | <= 0.5 | failed | not measured |" in text
    assert "| finite_tensors | – | holds | failed | x: qweight |" in text
    assert "Also checked, and true: hashes." in text
    assert "| of the quality | – | none was set | – |  |" in markdown.page({**document, "gates": [HOLDS]})


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
    ("content", "word"),
    [
        ("{", "are not JSON"),
        ("[" * 100_000, "are not JSON"),
        ("[]", "none of the verbs"),
        ('{"a": 1}', "none of the verbs"),
    ],
)
def test_results_that_are_none(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=word):
        results.read(str(tmp_path / "x.json"))
    with pytest.raises(UsageError, match="cannot read"):
        results.read(str(tmp_path / "missing.json"))


def test_results_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="more than 1 MiB"):
        results.read("/dev/zero")


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
