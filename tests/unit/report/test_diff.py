"""How the two sides of a plan read where audits are compared."""

from __future__ import annotations

import pytest

from auditor.document.compared import Figures
from auditor.report.diff import error, exceptions


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "no plan"),
        (Figures("fp16", 0.001, 0.002, 1.5, True, 0), "0.0020"),
        (Figures("fp16", 0.001, None, 1.5, False, 0), "failed"),
        (Figures("fp8_e4m3", 0.001, None, 1.5, False, 0), "not run"),
    ],
)
def test_a_plan_that_cannot_be_run_has_not_failed(plan: Figures | None, words: str) -> None:
    assert error(plan) == words


def test_functions_that_one_side_alone_keeps_are_named() -> None:
    was = Figures("fp16", 0.001, 0.002, 1.5, True, 0, (("", "pow"), ("head", "exp")))
    now = Figures("fp16", 0.001, 0.002, 1.5, True, 0, (("head", "exp"), ("head", "linear")))
    assert (
        exceptions(was, now)
        == "Functions of low modules in FP32 now: linear in head; no longer in FP32: pow in (whole model)."
    )
    assert exceptions(now, None) == "Functions of low modules no longer in FP32: exp in head, linear in head."
    assert exceptions(None, was) == "Functions of low modules in FP32 now: pow in (whole model), exp in head."
    assert exceptions(was, was) == exceptions(None, None) == ""
