"""Drawn models whose Python decides: loops, branches, transforms, hooks, regions, and state that it keeps."""

from __future__ import annotations

from tests.any_model.drawn import EXAMPLES, audited, mostly_audited


def test_python() -> None:
    mostly_audited(audited(("python",), EXAMPLES))


def test_state_and_random_numbers() -> None:
    mostly_audited(audited(("state",), EXAMPLES))
