"""The chart of plans: where each plan stands, its name, and the budget."""

from dataclasses import replace
from itertools import pairwise

import pytest

from auditor.records import Verification
from auditor.report.charts import plan_chart
from tests.unit.report.factory import make_audit


def points(chart):
    """{class: [(x, y)]} of the marks of plans."""
    marks = {}
    for kind, path in chart.paths:
        if kind.startswith("mark"):
            x, y = path.removeprefix("M").removesuffix("h0").split()
            marks.setdefault(kind, []).append((float(x), float(y)))
    return marks


def with_plans(audit, **changes):
    """The audit with its plans changed: {name: new fields}; all others go."""
    return replace(audit, plans={name: replace(audit.plans[name], **new) for name, new in changes.items()})


def measured(error):
    return Verification(error, True, "audited", "emulated")


def test_faster_plans_stand_to_the_right_and_better_ones_lower():
    audit = with_plans(
        make_audit(12),
        cast_fp16={"predicted_speedup": 3.0, "verification": measured(1e-3)},
        cast_bf16={"predicted_speedup": 1.5, "verification": measured(1e-1)},
    )
    chart = plan_chart(audit)
    ((x_fp16, y_fp16),) = points(chart)["mark fp16"]
    ((x_bf16, y_bf16),) = points(chart)["mark bf16"]
    assert x_fp16 > x_bf16
    assert y_fp16 > y_bf16  # pixels count from the top
    ((limit),) = [y for _, y, _, words in chart.names if words == f"budget {audit.max_error:g}"]
    assert y_bf16 < limit < y_fp16
    assert {words for *_, words in chart.names} == {
        "budget 0.01",
        "FP16 with cast weights",
        "BF16 with cast weights",
    }


def test_a_decade_is_as_high_as_the_next():
    errors = {"autocast_fp16": 1e-4, "cast_fp16": 1e-3, "autocast_bf16": 1e-2}
    audit = with_plans(make_audit(12), **{name: {"verification": measured(x)} for name, x in errors.items()})
    marks = points(plan_chart(audit))
    first, second, third = sorted(y for kind in marks for _, y in marks[kind])
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_a_plan_that_is_nan_or_was_not_run_is_shown_as_such():
    audit = with_plans(
        make_audit(12),
        autocast_fp16={"verification": replace(measured(None), holds=False)},
        cast_fp16={"verification": None, "predicted_error": 0.005},
        cast_bf16={"verification": measured(0.002)},
        autocast_bf16={"verification": replace(measured(None), holds=False, failure="it raised")},
    )
    chart = plan_chart(audit)
    names = {words for *_, words in chart.names}
    assert {"FP16 with cast weights, predicted", "BF16 with cast weights"} < names
    assert any(name.startswith("FP16 under autocast, non-finite") for name in names)
    assert not any(name.startswith("BF16 under autocast") for name in names)
    assert "mark fp16 predicted" in points(chart)
    assert [kind for kind, _ in chart.paths if kind.startswith("gone")] == ["gone fp16"]


def test_names_of_plans_at_one_point_do_not_cover_each_other():
    same = {"predicted_speedup": 2.0, "verification": measured(1e-3)}
    audit = make_audit(12)
    chart = plan_chart(with_plans(audit, **dict.fromkeys(audit.plans, same)))
    heights = sorted(y for _, y, side, _ in chart.names if side == "end")
    assert len(heights) == 4
    assert all(after - before >= 20 for before, after in pairwise(heights))


def test_no_chart_without_an_error_to_show():
    audit = make_audit(12)
    assert plan_chart(replace(audit, plans={})) is None
    unknown = {"verification": None, "predicted_error": float("nan")}
    assert plan_chart(with_plans(audit, cast_fp16=unknown)) is None
