"""Progress: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

import io
import re
import sys
import threading
import time
from types import ModuleType

import pytest
import torch
from torch import nn

import auditor
from auditor.progress.shown import Bar, Display, Lines, refresh_display, reporter
from auditor.settings import Settings


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
    with refresh_display(reporter(quiet)) as progress:
        progress("measure", "first", 0, 2)
        progress("measure", "second", 1, 2)
        progress("solve", "[bold]", 0, 0)
    return stream.getvalue()


def test_lines_name_each_stage_once_and_a_bar_is_wiped(monkeypatch):
    assert run(io.StringIO(), monkeypatch) == "measure: first\nsolve: [bold]\n"
    assert run(io.StringIO(), monkeypatch, quiet=True) == ""
    text = run(Terminal(), monkeypatch)
    assert "measure (stage 2 of 6), " in text
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
            told.append((shown.summary().partition(",")[0], shown.share))
    assert told[:2] == [("load (stage 1 of 7)", 0), ("FP32 score (stage 2 of 8)", pytest.approx(1 / 8))]
    assert told[-1][0] == "write (stage 12 of 12)"
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[-1][1] < 1


def test_stages_that_the_settings_announce_count_from_the_beginning():
    """The share rises with every stage, as none is added on the way."""
    asked = Settings(mode="training").model_copy(update={"target": "net.py"})
    shown, told = Display(asked), []
    until_planned = ("load", "capture", "measure", "baseline", "training", "classify", "plan")
    for stage in (*until_planned, "low-precision steps", "follow", "write"):
        shown(stage, "", 0, 0)
        told.append((shown.summary().partition(" done")[0], shown.share))
    assert [said for said, _ in told[2:4]] == [
        "measure (stage 3 of 10), in total 20%",
        "baseline (stage 4 of 10), in total 30%",
    ]
    assert [share for _, share in told] == pytest.approx([n / 10 for n in range(10)])


def test_an_audit_runs_the_stages_that_its_settings_announce():
    told = dict[str, None]()
    batch = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)
    asked = {"formats": "bf16", "strategies": "autocast", "mode": "training", "loss_fn": nn.functional.cross_entropy}
    auditor.audit(nn.Linear(6, 2), batch, progress=lambda stage, *_: told.setdefault(stage), **asked)
    assert [*told] == Display(Settings(mode="training"))._stages


def test_a_stage_that_is_added_takes_nothing_back():
    shown, shares = Display(), []
    for stage, done in (("capture", 0), ("measure", 9), ("training", 0), ("classify", 0)):
        shown(stage, "", done, 10)
        shares.append(shown.share)
    assert shares == [0, pytest.approx(1.9 / 6), pytest.approx(1.9 / 6), pytest.approx(4 / 7)]


@pytest.mark.parametrize(
    ("kind", "stream", "line"),
    [
        (Lines, io.StringIO, r"  measure \(stage 2 of 6\), in total 33% done after \d+ s\n"),
        (Bar, Terminal, r"[━#][^\r]* measure \(stage 2 of 6\), in total 33% done after \d+ s 4 nodes"),
    ],
)
def test_it_is_shown_again_though_nothing_is_told(kind, stream, line, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(kind, "every", 0.05)
    with refresh_display(kind()) as progress:
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
    assert list(dict.fromkeys(stages)) == ["capture", "measure", "baseline", "classify", "plan", "follow"]
    assert re.fullmatch(r"audited in \d+ s", notebook[-1][0])


def test_what_was_raised_is_no_end_of_an_audit_and_the_thread_ends_with_it(notebook):
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    def broken() -> None:
        with refresh_display(reporter()) as line:
            line("plan", "<b>", 0, 0)
            assert "auditor-progress" in threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert "auditor-progress" not in threads()
    assert notebook[-1][0].startswith("ended in plan after ")
    assert "&lt;b&gt;" in notebook[0][1]
    assert "<progress" in notebook[0][1]
