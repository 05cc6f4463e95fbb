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

import pytest

from auditor.progress.shown import Bar, Clock, Lines, Place, Reporter, duration, reporter


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
    with reporter(quiet) as progress:
        progress("measure", "first", 0, 2)
        progress("measure", "second", 1, 2)
        progress("solve", "[bold]", 0, 0)
    return stream.getvalue()


def test_lines_name_each_stage_once(monkeypatch):
    assert run(io.StringIO(), monkeypatch) == "measure: first\nsolve: [bold]\n"


def test_quiet_says_nothing(monkeypatch):
    assert run(Terminal(), monkeypatch, quiet=True) == ""


def test_bar_is_drawn_and_wiped(monkeypatch):
    text = run(Terminal(), monkeypatch)
    assert "measure" in text
    assert "\x1b[2K" in text  # the line is erased at the end


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = run(Terminal(), monkeypatch)
    assert "\x1b[3" not in text  # no colour code
    assert "measure" in text


@pytest.mark.parametrize(("name", "value"), [("CI", "1"), ("TERM", "dumb")])
def test_terminals_without_cursor_get_lines(monkeypatch, name, value):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(reporter(False), Bar)
    monkeypatch.setenv(name, value)
    assert isinstance(reporter(False), Lines)


def test_the_place_of_a_stage_among_all_and_those_that_not_every_audit_has():
    place, told = Place(), []
    run = ("load", "FP32 score", "capture", "measure", "training", "plan", "scores", "graph", "follow", "write")
    for stage in run:
        for done in (0, 1) if stage == "measure" else (0,):
            place.heard(stage, "", done, 2 if stage == "measure" else 0)
            told.append((place.number(), place.share))
    assert told[:2] == [("load 1/7", 0), ("FP32 score 2/8", pytest.approx(1 / 8))]
    assert told[-1][0] == "write 12/12"
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[-1][1] < 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (65, "1:05 min"), (3720, "1:02 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_its_thread_ends_with_it_whatever_is_raised(kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown: Reporter = kind()

    def interrupted() -> None:
        with shown:
            shown("measure", "first", 0, 2)
            assert "auditor-progress" in threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "auditor-progress" not in threads()
    assert sys.stderr.getvalue()


def test_a_log_gets_a_line_every_so_often(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Lines(every=0.05) as progress:
        progress("capture", "Net", 0, 0)
        progress("measure", "4 nodes", 0, 4)
        progress("measure", "4 nodes", 4, 4)
        time.sleep(0.4)
    first, second, *still = stream.getvalue().splitlines()
    assert (first, second) == ("capture: Net", "measure: 4 nodes")
    assert len(still) >= 3
    assert all(re.fullmatch(r"  measure 2/6, 33% done, \d+ s", line) for line in still), still


def test_a_line_is_redrawn_though_nothing_is_told(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("auditor.progress.shown.REDRAWN", 0.05)
    with Bar() as progress:
        progress("measure", "4 nodes", 4, 4)
        before = len(stream.getvalue())
        time.sleep(0.5)
        during = stream.getvalue()[before:]
    assert during.count("measure 2/6") >= 4
    assert "100%" not in during
    assert "100% done" in stream.getvalue()


def test_a_clock_stopped_from_its_own_thread_does_not_wait_for_itself():
    heard = []

    def act() -> None:
        heard.append(1)
        clock.stop()

    clock = Clock(0.01, act)
    clock.start()
    time.sleep(0.2)
    assert heard == [1]


def test_a_copy_of_the_process_writes_to_stderr_itself(tmp_path):
    """The line's lock may be held by a thread that the copy has not."""
    script = """
import os, signal, sys
from auditor.progress.shown import Bar
with Bar() as progress:
    progress("measure", "", 0, 0)
    held = progress._progress.live._lock
    import threading
    taken, over = threading.Event(), threading.Event()
    def hold():
        with held, progress._progress.console._lock:
            taken.set(); over.wait()
    thread = threading.Thread(target=hold); thread.start(); taken.wait()
    assert hasattr(sys.stderr, "rich_proxied_file")
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        print("from the copy", file=sys.stderr, flush=True)
        os._exit(7)
    code = os.waitpid(child, 0)[1]
    over.set(); thread.join()
print(os.waitstatus_to_exitcode(code))
"""
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "TERM": "xterm",
    }  # what stands for stderr does so on a terminal alone
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout == "7\n"
    assert "from the copy" in done.stderr


SLOW = """
import ctypes
import time
from pathlib import Path
import torch
ctypes.PyDLL(None).sleep(3)  # holds the interpreter, as loading a library does
torch.manual_seed(0)
CALLS = Path(__file__).with_name("calls")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        calls = int(CALLS.read_text()) + 1 if CALLS.exists() else 1
        CALLS.write_text(str(calls))
        if calls in (2, 7):
            time.sleep(3)
        if calls == 5:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                pass
        return self.layer(x).softmax(-1)
model = Net()
def get_inputs(): return torch.randn(4, 8)
"""


def on_a_terminal(command: list[str], folder: Path) -> tuple[list[tuple[float, str]], str, int]:
    """(when, what) of every write to a terminal as stderr; stdout; exit code."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "160",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    environment.pop("CI", None)
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


def test_a_terminal_never_waits_two_seconds_and_the_share_grows_to_all(tmp_path):
    """One operation of the model takes three seconds, asleep or at work; importing it lets no other thread run as long."""
    (tmp_path / "model.py").write_text(SLOW)
    command = [
        sys.executable,
        "-m",
        "auditor",
        "model.py",
        "--format",
        "json",
        "--strategies",
        "cast",
        "--formats",
        "bf16",
        "--max-error",
        "0.001",  # which not all low holds: a plan is made, and run
    ]
    written, answer, code = on_a_terminal(command, tmp_path)
    assert code in (0, 1)
    assert answer.startswith("{")
    assert int((tmp_path / "calls").read_text()) >= 7  # the slow ones were among them
    drawn = [(when, text) for when, text in written if re.search(r"\d/\d", text)]
    assert drawn[-1][0] - drawn[0][0] > 6
    shown = [(when, text) for when, text in written if when <= drawn[-1][0]]
    assert max(b - a for (a, _), (b, _) in pairwise(shown)) < 2  # from the first sign of life, before torch is loaded
    shares = [int(share) for _, text in drawn for share in re.findall(r"(\d+)% done", text.replace(">99%", "99%"))]
    assert shares == sorted(shares)
    assert shares[-1] == 100
