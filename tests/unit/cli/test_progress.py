"""Progress: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import sys

import pytest

from auditor.cli.progress import Bar, Lines, reporter


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
