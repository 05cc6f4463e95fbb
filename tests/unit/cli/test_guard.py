"""What a watched command tells of its progress."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from auditor.cli import guard


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a pipe at which everything arrives that is told."""
    there, tell = os.pipe()
    monkeypatch.setattr(guard, "_tell", tell)
    monkeypatch.setattr(guard, "_told", ("", -guard.AGAIN))
    yield there
    os.close(there)
    os.close(tell)


def test_a_stage_is_told_of_when_it_begins_and_then_now_and_again(heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(guard.time, "monotonic", lambda: now)
    for stage, step in (
        ("load", 0.0),
        ("measure", 0.0),
        ("measure", guard.AGAIN / 3),
        ("measure", guard.AGAIN),
        ("plan", 0.0),
    ):
        now += step
        guard.at(stage)
    assert os.read(heard, 4096) == b"at load\nat measure\nat measure\nat plan\n"
