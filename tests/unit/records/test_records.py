"""What records say of themselves: what a plan keeps, which weights are tied."""

import pytest

from auditor.records import Placeholder, Plan, Reason, ScopeChoice


@pytest.mark.parametrize(("holders", "expected"), [((), False), (("a",), False), (("a", "b"), True)])
def test_a_weight_that_several_modules_hold_is_tied(holders: tuple[str, ...], expected: bool) -> None:
    assert Placeholder("p_w", "parameter", "a.w", holders=holders).is_shared is expected


SCOPES = {"": ScopeChoice("fp16"), "norm": ScopeChoice("fp32"), "head": ScopeChoice("fp32")}


def test_what_is_kept_are_the_modules_that_reasons_name() -> None:
    plan = Plan("cast_fp16", "cast", "fp16", SCOPES, 0.001, 0.9, 2.0)
    assert plan.kept_modules == ("norm", "head")  # as far as a file without reasons says
    reasons = (
        Reason("unsafe", "x is unsafe: it overflows", ("norm", "norm.inner")),
        Reason("not-floating", "has no floating-point operations", ("head",)),
        Reason("strategy", "autocast always runs softmax in FP32", operations=("softmax",)),
    )
    assert Plan("cast_fp16", "cast", "fp16", SCOPES, 0.001, 0.9, 2.0, reasons=reasons).kept_modules == (
        "norm",
        "norm.inner",
    )
