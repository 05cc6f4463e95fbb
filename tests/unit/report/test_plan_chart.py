"""The chart of plans: where each plan stands, its name, and the budget."""

from dataclasses import replace
from itertools import combinations

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
    assert "* FP16 under autocast, non-finite" in names
    assert "BF16 under autocast" not in names
    assert "mark fp16 predicted" in points(chart)
    assert [kind for kind, _ in chart.paths if kind.startswith("gone")] == ["gone fp16"]


@pytest.mark.parametrize(
    "speeds",
    [
        (2.0, 2.0, 2.0, 2.0),
        (1.2, 1.41, 1.47, 1.83),
        (1.0, 1.0, 3.0, 3.0),
        (1.5, 1.6, 1.7, 1.8),
    ],
)
@pytest.mark.parametrize("errors", [(1e-3,) * 4, (8e-4, 6.7e-3, 2.2e-3, 7.7e-3), (1e-4, 9.9e-3, 1e-4, 9.9e-3)])
def test_names_cover_neither_each_other_nor_points(speeds, errors):
    audit = make_audit(12)
    plans = {
        name: {"predicted_speedup": speed, "verification": measured(error)}
        for name, speed, error in zip(audit.plans, speeds, errors, strict=True)
    }
    chart = plan_chart(with_plans(audit, **plans))
    assert len(chart.names) == 5
    boxes = []
    for x, y, anchor, words in chart.names:
        width = 8.5 * len(words)
        boxes.append((x, x + width, y) if anchor == "start" else (x - width, x, y))
    for one, other in combinations(boxes, 2):
        apart = one[1] <= other[0] or other[1] <= one[0]
        assert apart or abs(one[2] - other[2]) >= 16, (one, other)
    for left, right, base in boxes:
        assert left >= 0
        assert right <= chart.width
        assert not any(left < x < right and base - 12 < y < base for kind in points(chart).values() for x, y in kind)


def test_no_chart_without_an_error_to_show():
    audit = make_audit(12)
    assert plan_chart(replace(audit, plans={})) is None
    unknown = {"verification": None, "predicted_error": float("nan")}
    assert plan_chart(with_plans(audit, cast_fp16=unknown)) is None
