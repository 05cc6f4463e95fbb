"""Width and colour follow where stdout goes and what the environment asks for."""

from __future__ import annotations

import sys

import pytest

from auditor.report.blocks import WIDEST, looks


@pytest.fixture
def environment(monkeypatch):
    """environment(tty, columns, **variables): nothing else of the real one is left."""

    def become(tty: bool, columns: int = 100, **variables: str) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"COLUMNS": str(columns), **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)

    return become


@pytest.mark.parametrize(
    ("tty", "variables", "expected"),
    [
        (True, {}, (100, True)),
        (True, {"NO_COLOR": "1"}, (100, False)),
        (True, {"NO_COLOR": ""}, (100, True)),
        (True, {"TERM": "dumb"}, (100, False)),
        (False, {}, (100, False)),
        (False, {"FORCE_COLOR": "1"}, (100, True)),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, (100, False)),
    ],
)
def test_looks(environment, tty, variables, expected):
    environment(tty, **variables)
    assert looks() == expected


def test_a_wide_terminal_is_not_filled(environment):
    environment(True, columns=400)
    assert looks().width == WIDEST
