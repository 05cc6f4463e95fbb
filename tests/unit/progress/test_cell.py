"""The line below a notebook's cell: one, that changes, and says at the end how long it took."""

from __future__ import annotations

import re
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from auditor.progress.cell import Cell, in_notebook

Shown = list[tuple[str, str, bool]]
"""Text, HTML, and whether an earlier line was changed."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What stands for the kernel of a notebook, and what it was asked to display."""
    told: Shown = []
    ids: set[str] = set()

    class ZMQInteractiveShell: ...

    def display(data: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        assert (display_id in ids) == update
        ids.add(display_id)
        told.append((data["text/plain"], data["text/html"], update))

    package, inner = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    inner.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return told


def audited(**asked: Any) -> auditor.Audit:
    model = nn.Linear(6, 2)
    return auditor.audit(model, torch.ones(4, 6), formats=("bf16",), strategies=("cast",), **asked)


def test_a_notebook_shows_one_line_by_default(notebook: Shown) -> None:
    assert in_notebook()
    audited()
    assert [update for *_, update in notebook] == [False] + [True] * (len(notebook) - 1)
    stages = [text.split()[0] for text, *_ in notebook[:-1]]
    assert list(dict.fromkeys(stages)) == ["capture", "measure", "classify", "baseline", "plan", "follow"]
    assert re.fullmatch(r"audited in \d+ s", notebook[-1][0])
    assert "auditor-progress" not in {thread.name for thread in threading.enumerate()}


def test_it_is_redrawn_while_nothing_is_told(notebook: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.progress.shown.REDRAWN", 0.02)
    with Cell() as line:
        line("measure", "<b>", 8, 8)
        time.sleep(0.3)
    assert sum("measure 2/6" in text for text, *_ in notebook) >= 4
    assert all("&lt;b&gt;" in html and "<progress" in html for text, html, _ in notebook[:-1])
    assert "% done" in notebook[1][0]


def test_what_was_raised_is_no_end(notebook: Shown) -> None:
    def broken(*args: Any) -> None:
        raise AuditorError("no", slug="bad-option")

    with pytest.raises(AuditorError), Cell() as line:
        broken(line("plan", "", 0, 0))
    assert notebook[-1][0].startswith("ended in plan after ")


def test_nothing_is_shown_where_it_is_refused_or_heard_by_the_caller(notebook: Shown) -> None:
    heard: list[str] = []
    audited(progress=False)
    audited(progress=lambda stage, detail, done, total: heard.append(stage))
    assert notebook == []
    assert "plan" in heard


def test_elsewhere_it_has_to_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert not in_notebook()
    audited()
    assert capsys.readouterr() == ("", "")
    audited(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("capture")
