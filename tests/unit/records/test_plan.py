"""What a plan keeps in FP32, counted from its reasons."""

from __future__ import annotations

from auditor.records import Plan, Reason, ScopeChoice

SCOPES = {"": ScopeChoice("fp16"), "norm": ScopeChoice("fp32"), "head": ScopeChoice("fp32")}


def test_what_is_kept_are_the_modules_that_reasons_name() -> None:
    plan = Plan("cast_fp16", "cast", "fp16", SCOPES, 0.001, 0.9, 2.0)
    assert plan.kept == ("norm", "head")  # as far as a file without reasons says
    reasons = (
        Reason("unsafe", "x is unsafe: it overflows", ("norm", "norm.inner")),
        Reason("not-floating", "it has no floating-point operations", ("head",)),
        Reason("strategy", "autocast runs softmax in FP32 by itself", operations=("softmax",)),
    )
    assert Plan("cast_fp16", "cast", "fp16", SCOPES, 0.001, 0.9, 2.0, reasons=reasons).kept == ("norm", "norm.inner")
