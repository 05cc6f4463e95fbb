import math
from dataclasses import replace

import pytest

from auditor.report.blocks import WIDTH
from auditor.report.charts import BINS, HEIGHT, depth_chart
from tests.unit.report.factory import make_audit


def points(path):
    return [tuple(map(float, p.split())) for p in path.replace("M", "L").split("L") if p]


@pytest.mark.parametrize("nodes", [6, 3000])
def test_depth_chart_stays_in_its_frame_and_merges_long_models(nodes):
    chart = depth_chart(make_audit(nodes))
    assert len(chart.rows) <= BINS
    per_point = math.ceil((nodes - 2) / BINS)  # the two nodes without a local error are not drawn
    assert (f"worst of {per_point} " in chart.about) is (per_point > 1)
    for kind, path in chart.paths:
        if kind.startswith("line"):
            assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points(path))


def test_non_finite_errors_are_marked_and_break_the_line_and_the_plan_has_its_own():
    audit = make_audit(25)
    errors = {r.node.name: 1e-3 for r in audit.nodes if r.node.floating}
    chart = depth_chart(replace(audit, plan_errors=errors))
    paths = dict(chart.paths)
    assert paths["gone fp16"].count("M") == 8  # the overflow and its 7 heirs
    assert len(points(paths["line fp16"])) == 23 - 8
    assert not paths["gone bf16"]
    line = points(paths["line plan"])
    assert len(line) == 24  # the operation without a kernel runs in FP32 under the plan
    assert len({y for _, y in line}) == 1
    assert ("gone", "× non-finite") in chart.legend


def test_charts_without_data_are_none():
    assert depth_chart(make_audit(empty=True)) is None
