"""Drawn models of other dtypes, of scales that overflow and underflow, and of writes in place."""

from __future__ import annotations

from tests.any_model.drawn import EXAMPLES, audited, mostly_audited


def test_dtypes() -> None:
    mostly_audited(audited(("dtypes",), EXAMPLES))


def test_scales() -> None:
    mostly_audited(audited(("scales",), EXAMPLES))


def test_writes_in_place() -> None:
    mostly_audited(audited(("writes",), EXAMPLES))
