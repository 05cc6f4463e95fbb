"""How the two sides of a plan read where audits are compared."""

from __future__ import annotations

import pytest

from auditor.records import Plan, ScopeChoice
from auditor.report.diff import error, exceptions


def plan(fmt: str, measured: float | None, *exceptions: tuple[str, str]) -> Plan:
    scopes = {path: ScopeChoice(fmt, keep=tuple(n for p, n in exceptions if p == path)) for path in ("", "head")}
    return Plan(f"cast_{fmt}", "cast", fmt, scopes, 0.001, 0.5, 1.5, measured)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no plan"),
        (plan("fp16", 0.002), "0.0020"),
        (plan("fp16", None), "failed"),
        (plan("fp8_e4m3", None), "not run"),
    ],
)
def test_a_plan_that_cannot_be_run_has_not_failed(found: Plan | None, words: str) -> None:
    assert error(found) == words


def test_functions_that_one_side_alone_keeps_are_named() -> None:
    was = plan("fp16", 0.002, ("", "pow"), ("head", "exp"))
    now = plan("fp16", 0.002, ("head", "exp"), ("head", "linear"))
    assert (
        exceptions(was, now)
        == "Functions of low modules in FP32 now: linear in head; no longer in FP32: pow in (whole model)."
    )
    assert exceptions(now, None) == "Functions of low modules no longer in FP32: exp in head, linear in head."
    assert exceptions(None, was) == "Functions of low modules in FP32 now: pow in (whole model), exp in head."
    assert exceptions(was, was) == exceptions(None, None) == ""
