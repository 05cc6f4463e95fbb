"""Drawn models of modules and functions: each ends in an audit that keeps its promises, or in one line."""

from __future__ import annotations

from tests.any_model.drawn import EXAMPLES, audited, mostly_audited


def test_modules() -> None:
    mostly_audited(audited(("modules",), EXAMPLES))


def test_functions() -> None:
    mostly_audited(audited(("functions",), EXAMPLES))
