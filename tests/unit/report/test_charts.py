import math
from dataclasses import replace

import pytest

from auditor.records import Magnitudes
from auditor.report.charts import BINS, HEIGHT, WIDTH, depth_chart, tradeoff
from auditor.report.exponents import BARS_WIDTH, bars, exponent_map, narrowest
from tests.unit.report.factory import make_audit


def points(path):
    return [tuple(map(float, p.split())) for p in path.replace("M", "L").split("L") if p]


@pytest.mark.parametrize("nodes", [6, 120, 3000])
def test_depth_chart_stays_in_its_frame_and_merges_long_models(nodes):
    chart = depth_chart(make_audit(nodes))
    assert chart is not None
    assert len(chart.first) <= BINS
    assert chart.per_point == math.ceil((nodes - 2) / BINS)  # the two nodes without a local error are not drawn
    for series in chart.series:
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points(series.line))


def test_non_finite_errors_are_marked_and_break_the_line():
    chart = depth_chart(make_audit(25))
    assert chart is not None
    fp16, bf16 = chart.series
    assert len(fp16.gone) == 8  # the overflow and its 7 heirs
    assert len(points(fp16.line)) == 23 - 8
    assert not bf16.gone


def test_tradeoff_marks_one_choice_per_plan():
    chart = tradeoff(make_audit())
    assert chart is not None
    assert [c.recommended for c in chart.choices] == [True, False, False, False]


def test_tradeoff_marks_the_plan_where_it_is_not_where_the_solver_began():
    """A plan that was refined is on no curve: its mark, its words and the plan say one error and one time."""
    audit = make_audit()
    off = replace(audit.plans["cast_bf16"], predicted_error=0.0077, predicted_speedup=1.25)
    chart = tradeoff(replace(audit, plans={**audit.plans, "cast_bf16": off}))
    on = tradeoff(audit)
    assert chart is not None
    assert on is not None
    assert chart.choices[-1].title == "BF16 with cast weights: 0.0077 at 0.80"
    assert chart.choices[-1].x > on.choices[-1].x  # slower than at first


def test_charts_without_data_are_none():
    empty = make_audit(empty=True)
    assert depth_chart(empty) is None
    assert tradeoff(empty) is None
    assert exponent_map(empty) is None
    assert bars(None, ("fp16",)) is None


def test_bars_say_what_the_format_cannot_hold():
    # of 8 values, 2 are in [2^17, 2^18), 1 in [2^-20, 2^-19), 1 in [2^-30, 2^-29)
    chart = bars(Magnitudes(2.0**17, 2.0**-30, 0, {17: 2, -20: 1, -30: 1, 0: 4}), ("bf16", "fp16"))
    assert chart is not None
    assert chart.summary == "FP16: 25% above the largest, 12% subnormal, 12% lost to zero"
    assert [b.kind for b in chart.bands] == ["zero", "subnormal", "normal", "over"]
    assert all(0 <= x <= BARS_WIDTH for x, _, _ in chart.bars)


def test_exponent_map_draws_every_column():
    drawn = exponent_map(make_audit(3000))
    assert drawn is not None
    assert drawn.per_column == math.ceil(2998 / 96)
    assert any(drawn.levels)


def test_exponents_far_outside_the_chart_are_clamped():
    audit = make_audit(10)
    wild = replace(audit.nodes[0], range=Magnitudes(1e38, 1e-40, 0, {126: 1, -133: 1}))
    drawn = exponent_map(replace(audit, nodes=(wild, *audit.nodes[1:])))
    assert drawn is not None
    assert all(b.end <= b.start for b in drawn.bands)


def test_the_narrowest_format_is_where_ranges_hurt_first():
    assert narrowest(("bf16", "fp16")) == "fp16"
    assert narrowest(("bf16", "fp16", "fp8_e4m3")) == "fp8_e4m3"
    assert narrowest(()) is None


def test_the_recommended_plan_has_a_line_of_its_own_where_it_was_run():
    audit = make_audit(25)
    errors = {r.node.name: 1e-3 for r in audit.nodes if r.node.floating}
    chart = depth_chart(replace(audit, plan_errors=errors))
    assert chart is not None
    assert [s.key for s in chart.series] == ["fp16", "bf16", "plan"]
    line = points(chart.series[2].line)
    assert len(line) == 24  # the operation without a kernel runs in FP32 under the plan
    assert len({y for _, y in line}) == 1
    assert chart.series[2].dots == ""
