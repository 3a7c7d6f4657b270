"""stdout is the result, stderr is talk; what --json, --quiet, NO_COLOR and a terminal change."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr

import pytest

from omniw4.cli import output
from omniw4.cli.output import Output, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def talk(out: Output) -> None:
    out.note("a note")
    with out.progress("working") as bar:
        bar.step(1, 2, "layer a")
        out.warn("careful", "use --skip")
        bar.step(2, 2, "layer b")
    out.result("the result", {"answer": [1, None]})


def test_streams(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Output())
    stdout, stderr = capsys.readouterr()
    assert stdout == "the result\n"
    lines = stderr.splitlines()
    assert lines[0] == "a note"
    assert lines[1:4] == ["warning: careful", "", "hint: use --skip"]
    assert lines[4:] == ["working 2/2  layer b"]


def test_a_log_gets_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    log = io.StringIO()
    bar = ProgressBar("working", log)
    told = []
    for step in range(1, 41):  # one a second
        now += 1.0
        bar.step(step, 40, f"layer {step}")
        told.append(len(log.getvalue().splitlines()))
    assert told == [step // 5 for step in range(1, 41)]
    assert log.getvalue().splitlines()[0] == "working  5/40  layer 5  eta 00:35"
    bar.step(1, 2, title="another stage")
    assert log.getvalue().splitlines()[-1] == "working 40/40  layer 40"
    bar.step(2, 2, title="another stage")
    assert log.getvalue().splitlines()[-1] == "another stage 2/2"


def test_steps_that_take_long_are_each_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    log = io.StringIO()
    bar = ProgressBar("working", log)
    for step in range(1, 4):
        now += 60.0
        bar.step(step, 3)
    assert log.getvalue().splitlines() == ["working 1/3  eta 02:00", "working 2/3  eta 01:00", "working 3/3"]


def test_json_is_one_document_and_silence(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Output(json_mode=True))
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout) == {"answer": [1, None]}
    assert stderr == ""


def test_quiet_keeps_warnings_and_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Output(quiet=True))
    stdout, stderr = capsys.readouterr()
    assert stdout == "the result\n"
    assert stderr == "warning: careful\n\nhint: use --skip\n"


def test_not_a_number_never_reaches_a_json_reader() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        Output(json_mode=True).result("", {"x": float("nan")})


def test_no_control_characters_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Output())
    output.print_error("it failed", "try again")
    stdout, stderr = capsys.readouterr()
    assert not {"\x1b", "\r"} & set(stdout + stderr)
    assert stderr.endswith("error: it failed\n\nhint: try again\n")


def test_a_terminal_gets_one_line_redrawn(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        talk(Output())
    text = terminal.getvalue()
    assert "\r" in text
    assert "━" in text
    assert text.count("\n") == len(["a note", "warning: careful", "", "hint: use --skip"])


def test_the_bar_fits_the_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ProgressBar("quantizing", terminal).step(3, 7, "model.layers.3.mlp.down_proj" * 3)
    assert max(len(part.replace("\x1b[2K", "")) for part in terminal.getvalue().split("\r")) < 40


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_taken_away(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    with redirect_stderr(terminal):
        output.print_error("it failed", "try again")
        assert "\x1b[31;1merror:" in terminal.getvalue()
        terminal.truncate(0)
        terminal.seek(0)
        monkeypatch.setenv(variable, value)
        output.print_error("it failed", "try again")
    assert terminal.getvalue() == "error: it failed\n\nhint: try again\n"


@pytest.mark.parametrize("done", range(8))
def test_the_bar_has_a_constant_width(terminal: Terminal, done: int) -> None:
    bar = ProgressBar("x", terminal)
    bar.step(done, 7)
    drawn = terminal.getvalue()
    assert drawn.count("━") + drawn.count("╸") == ProgressBar.WIDTH


def test_eta_counts_from_where_the_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = io.StringIO()
    bar = ProgressBar("x", stream)
    bar.start_at(90)
    now[0] += 10
    bar.step(91, 100)
    assert "eta 01:30" in stream.getvalue(), "10 s for one of the nine left, not for 91"


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (242 << 20, "242 MiB"),
        (3 << 30, "3.00 GiB"),
        (5000 << 30, "5000.00 GiB"),
    ],
)
def test_size(count: int, wanted: str) -> None:
    assert output.size(count) == wanted


@pytest.mark.parametrize(("seconds", "wanted"), [(0, "00:00"), (177.4, "02:57"), (3723, "1:02:03"), (59.6, "01:00")])
def test_clock(seconds: float, wanted: str) -> None:
    assert output.clock(seconds) == wanted


def test_table_aligns() -> None:
    text = output.table(("name", "value"), [("a", "1.25"), ("longer", "10")])
    assert text.splitlines() == ["name    value", "──────  ─────", "a        1.25", "longer     10"]


def test_table_without_rows() -> None:
    assert output.table(("a", "b"), []).splitlines() == ["a  b", "─  ─"]
