"""Flagged regions as the report lists them."""

from __future__ import annotations

import math
from dataclasses import replace

from auditor.records import FlaggedRegion
from auditor.report import html
from auditor.report.origins import origins
from tests.unit.report.factory import make_audit


def region(scope: str, error: float | None, *, fmt: str = "fp16", size: int = 2, failure: str | None = None):
    return FlaggedRegion(fmt, tuple(f"n{i}" for i in range(size)), scope, error, error, 0.001, failure)


def test_regions_are_ranked_and_single_operations_left_out():
    found = (
        region("small", 0.1),
        region("alone", 0.9, size=1),
        region("other", 0.9, fmt="bf16"),
        region("broken", math.nan),
        region("large", 0.5),
    )
    ranked = origins(replace(make_audit(30), regions=found), "fp16").regions
    assert [r.scope for r in ranked] == ["broken", "large", "small"]


def test_a_region_that_does_not_run_says_why():
    page = html.render(replace(make_audit(30), regions=(region("blocks.0", None, failure="no kernel <here>"),)))
    assert "Hurts together" in page
    assert "does not run" in page
    assert "no kernel &lt;here&gt;" in page
    assert "Hurts together" not in html.render(make_audit(30))
