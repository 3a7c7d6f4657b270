"""``omniw4 report`` over what the other verbs printed, and its page in a real headless browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from harness import HIDDEN, Run

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.fixture(scope="module")
def page(run: Run, checkpoint: Path, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it."""
    work = tmp_path_factory.mktemp("report")
    folder = shutil.copytree(checkpoint, work / "w4a4")
    verbs: dict[str, tuple[Any, ...]] = {
        "verify": ("verify", folder, "--model", qwen3, "--windows", 1, "--seq-len", 64),
        "bench": ("bench", folder, "--model", qwen3, "--shapes", f"3x64x{HIDDEN}", "--prefill", "1x8",
                  "--repetitions", 2),
        "profile": ("profile", qwen3, "--checkpoint", folder, "--engine", "hf,swapped", "--tokens", 16, "--steps", 1,
                    "--repetitions", 2, "--out", work / "profile"),
        "roofline": ("roofline", folder, "--gpu", "L4", "--tokens", 64),
    }  # fmt: skip
    for name, arguments in verbs.items():
        ran = run(*arguments, "--json")
        assert ran.code == 0, ran.stderr
        (folder / f"{name}.json").write_text(ran.stdout, encoding="utf-8")
    ran = run("report", folder, "--results", f"again={folder / 'verify.json'}")
    assert ran.code == 0, ran.stderr
    assert "report.html" in ran.stdout
    return folder / "report" / "report.html"


def test_every_verb_s_result_is_in_the_report(page: Path) -> None:
    document = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    assert [row["recipe"] for row in document["quality"]] == ["", "again"]
    assert all(document[kind] for kind in ("bench", "profile", "roofline"))
    assert document["notes"] == [], "verify, bench and profile tell their checkpoint"
    assert all(document[kind]["hash"] == document["hash"] for kind in ("bench", "profile"))
    assert document["layers"][0]["held_out_error"] is not None
    text = page.read_text(encoding="utf-8")
    for heading in ("Quality", "Worst linears", "Where the time goes", "Measured times", "Roofline", "Recipe"):
        assert f"<h2>{heading}" in text
    assert text.count("<svg") == 5


def test_the_checkpoint_still_loads_with_its_report_inside(run: Run, page: Path) -> None:
    assert run("inspect", page.parents[1], "--hashes").code == 0


def test_a_report_without_a_verdict_says_what_is_missing(
    run: Run, checkpoint: Path, page: Path, tmp_path: Path
) -> None:
    ran = run("report", checkpoint, "--out", tmp_path / "out", "--no-plots")
    assert ran.code == 0
    assert "no verdict" in ran.stderr
    assert f"> {checkpoint / 'verify.json'}`" in ran.stderr
    verdict = page.parents[1] / "verify.json"
    judged = run("report", page.parents[1], "--results", verdict, "--out", tmp_path / "judged", "--no-plots")
    assert judged.code == 0
    assert "no verdict" not in judged.stderr


def test_user_errors(run: Run, checkpoint: Path, qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("report", tmp_path / "none", "--out", out).failed(2, "none")
    run("report", qwen3, "--out", out).failed(2, "quantization_config")
    run("report", checkpoint, "--out", out, "--results", "none.json").failed(2, "none.json")
    (tmp_path / "odd.json").write_text("{}", encoding="utf-8")
    run("report", checkpoint, "--out", out, "--results", tmp_path / "odd.json").failed(2, "odd.json")
    assert not out.exists()


def browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no headless browser ({', '.join(BROWSERS[:2])}): apt-get install chromium-headless-shell")


def browse(file: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page; its stdout, and what it logged to the console or failed to load."""
    command = [
        browser(), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--disable-background-networking", *flags, file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if re.search(r"CONSOLE|net::ERR|net_error", line)]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark"), (400, "light")])
def test_the_page_opens_in_a_browser(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """No console error, nothing fetched, as wide as the window, and drawn in the colours of the scheme."""
    probe = tmp_path / "probe.html"
    script = (
        "<script>addEventListener('load', () => { document.title = JSON.stringify({"
        "width: document.documentElement.scrollWidth, window: innerWidth,"
        "fetched: performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:')),"
        "smallest: Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)),"
        "}) })</script>"
    )
    text = page.read_text(encoding="utf-8")
    probe.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    flags = [f"--window-size={width},1400", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    dom, complaints = browse(probe, *flags, "--dump-dom")
    assert complaints == []
    found = json.loads(re.search(r"<title>(.*?)</title>", dom)[1])  # type: ignore[index]
    assert found["fetched"] == []
    assert found["width"] <= found["window"] == width
    assert found["smallest"] >= 7, "text of the plots can be read"
    shot = tmp_path / "page.png"
    _, complaints = browse(page, *flags, f"--screenshot={shot}")
    assert complaints == []
    red, green, blue = first_pixel(shot.read_bytes())
    assert (max(red, green, blue) < 64) == (scheme == "dark"), (red, green, blue)


def first_pixel(png: bytes) -> tuple[int, int, int]:
    """The upper left pixel, which every filter of PNG leaves as it is."""
    data, at = b"", 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    red, green, blue = zlib.decompressobj().decompress(data, 8)[1:4]
    return red, green, blue
