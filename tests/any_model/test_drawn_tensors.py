"""Drawn models of other dtypes, of scales that overflow and underflow, and of writes in place."""

from __future__ import annotations

from tests.any_model.drawn import EXAMPLES, Program, Step, audited, mostly_audited, outcome


def test_dtypes() -> None:
    mostly_audited(audited(("dtypes",), EXAMPLES))


def test_scales() -> None:
    mostly_audited(audited(("scales",), EXAMPLES))


def test_writes_in_place() -> None:
    mostly_audited(audited(("writes",), EXAMPLES))


def test_quantised_under_vmap() -> None:
    steps = (Step("vmapped", 0, (Step("discrete", 4),)),)
    assert outcome(Program(steps, options={"formats": ("bf16",), "strategies": ("cast",)})) == "audited"


def test_conjugated() -> None:
    steps = (Step("complexes", 0),)
    assert outcome(Program(steps, options={"formats": ("bf16",), "strategies": ("cast",)})) == "audited"
