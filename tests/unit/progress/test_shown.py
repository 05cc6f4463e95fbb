"""Progress: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import auditor
from auditor.progress.shown import Bar, Display, Lines, reporter, ticking


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run(stream: io.StringIO, monkeypatch, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with ticking(reporter(quiet)) as progress:
        progress("measure", "first", 0, 2)
        progress("measure", "second", 1, 2)
        progress("solve", "[bold]", 0, 0)
    return stream.getvalue()


def test_lines_name_each_stage_once_and_a_bar_is_wiped(monkeypatch):
    assert run(io.StringIO(), monkeypatch) == "measure: first\nsolve: [bold]\n"
    assert run(io.StringIO(), monkeypatch, quiet=True) == ""
    text = run(Terminal(), monkeypatch)
    assert "measure 2/6 " in text
    assert text.endswith("\r\x1b[2K")


@pytest.mark.parametrize(("name", "value"), [("CI", "1"), ("TERM", "dumb")])
def test_terminals_without_cursor_get_lines(monkeypatch, name, value):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(reporter(False), Bar)
    monkeypatch.setenv(name, value)
    assert isinstance(reporter(False), Lines)


def test_the_place_of_a_stage_among_all_and_those_that_not_every_audit_has():
    shown, told = Display(), []
    run = ("load", "FP32 score", "capture", "measure", "training", "plan", "scores", "graph", "follow", "write")
    for stage in run:
        for done in (0, 1) if stage == "measure" else (0,):
            shown(stage, "", done, 2 if stage == "measure" else 0)
            told.append((shown.place(), shown.share))
    assert told[:2] == [("load 1/7", 0), ("FP32 score 2/8", pytest.approx(1 / 8))]
    assert told[-1][0] == "write 12/12"
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[-1][1] < 1


@pytest.mark.parametrize(
    ("kind", "stream", "line"),
    [
        (Lines, io.StringIO, r"  measure 2/6, 33% done, \d+ s\n"),
        (Bar, Terminal, r"measure 2/6 [^\r]* 33% done, \d+ s 4 nodes"),
    ],
)
def test_it_is_shown_again_though_nothing_is_told(kind, stream, line, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(kind, "every", 0.05)
    with ticking(kind()) as progress:
        progress("capture", "Net", 0, 0)
        progress("measure", "4 nodes", 0, 4)
        progress("measure", "4 nodes", 4, 4)
        time.sleep(0.6)
    assert len(re.findall(line, sys.stderr.getvalue())) >= 3


Cells = list[tuple[str, str, bool]]
"""Text, HTML, and whether an earlier line was changed."""


@pytest.fixture
def notebook(monkeypatch) -> Cells:
    """What stands for the kernel of a notebook, and what it was asked to display."""
    told: Cells = []

    class ZMQInteractiveShell: ...

    def display(data: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw and update == bool(told)
        told.append((data["text/plain"], data["text/html"], update))

    package, inner = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = ZMQInteractiveShell
    inner.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return told


def test_a_notebook_shows_one_line_by_default(notebook):
    auditor.audit(nn.Linear(6, 2), torch.ones(4, 6), formats="bf16", strategies="cast")
    stages = [text.split()[0] for text, *_ in notebook[:-1]]
    assert list(dict.fromkeys(stages)) == ["capture", "measure", "classify", "baseline", "plan", "follow"]
    assert re.fullmatch(r"audited in \d+ s", notebook[-1][0])


def test_what_was_raised_is_no_end_of_an_audit_and_the_thread_ends_with_it(notebook):
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    def broken() -> None:
        with ticking(reporter()) as line:
            line("plan", "<b>", 0, 0)
            assert "auditor-progress" in threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert "auditor-progress" not in threads()
    assert notebook[-1][0].startswith("ended in plan after ")
    assert "&lt;b&gt;" in notebook[0][1]
    assert "<progress" in notebook[0][1]


SLOW = """
import time
from pathlib import Path
import torch
torch.manual_seed(0)
CALLS = Path(__file__).with_name("calls")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        calls = int(CALLS.read_text()) + 1 if CALLS.exists() else 1
        CALLS.write_text(str(calls))
        if calls == 2:
            time.sleep(2.5)
        if calls == 5:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                pass
        return self.layer(x).softmax(-1)
model = Net()
def get_inputs(): return torch.randn(4, 8)
"""


def on_a_terminal(command: list[str], folder: Path) -> tuple[list[tuple[float, str]], str, int]:
    """(when, what) of every write to a terminal as stderr; stdout; exit code."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": str(Path(__file__).parents[3])}
    with (folder / "stdout").open("wb") as stdout:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=theirs)
    os.close(theirs)
    written: list[tuple[float, str]] = []
    while True:
        if not select.select([ours], [], [], 60)[0]:
            process.kill()
            break
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written.append((time.monotonic(), piece.decode(errors="replace")))
    os.close(ours)
    return written, (folder / "stdout").read_text(), process.wait()


@pytest.mark.slow
def test_a_terminal_never_waits_two_seconds_and_the_share_grows_to_all(tmp_path):
    """One operation of the model takes longer, asleep or at work."""
    (tmp_path / "model.py").write_text(SLOW)
    options = "--format json --strategies cast --formats bf16 --max-error 0.001"  # not all low holds it: a plan is made
    command = [sys.executable, "-m", "auditor", "model.py", *options.split()]
    written, answer, code = on_a_terminal(command, tmp_path)
    assert code in (0, 1)
    assert answer.startswith("{")
    assert int((tmp_path / "calls").read_text()) >= 5  # the slow ones were among them
    drawn = [(when, text) for when, text in written if re.search(r"\d/\d", text)]
    assert drawn[-1][0] - drawn[0][0] > 5
    shown = [(when, text) for when, text in written if when <= drawn[-1][0]]
    assert max(b - a for (a, _), (b, _) in pairwise(shown)) < 2  # from the first sign of life, before torch is loaded
    shares = [int(share) for _, text in drawn for share in re.findall(r"(\d+)% done", text.replace(">99%", "99%"))]
    assert shares == sorted(shares)
    assert shares[-1] >= 85  # as the files are written
    assert written[-1][1].endswith("\x1b[2K")
