"""Flagged regions as the report lists them."""

from __future__ import annotations

import math
from dataclasses import replace

from auditor.records import FlaggedRegion, NodeError
from auditor.report.origins import origins
from auditor.report.reporters import html
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
    assert "Neighbouring operations, lowered together" in page
    assert "does not run" in page
    assert "no kernel &lt;here&gt;" in page
    assert "Neighbouring operations, lowered together" not in html.render(make_audit(30))


def test_a_format_in_which_nothing_moves_the_outputs_says_so():
    audit = make_audit(30)
    quiet = {"own": 0.0, "isolated": 0.0}
    nodes = tuple(
        replace(
            report,
            errors={},
            contributions={fmt: replace(found, **quiet) for fmt, found in report.contributions.items()},
        )
        for report in audit.nodes
    )
    audit = replace(audit, baselines={})
    said = "In FP16 no value that is finite in FP32 becomes Inf or NaN, and no rounding that was measured moves the outputs."
    assert said in html.render(replace(audit, nodes=nodes))
    assert said not in html.render(audit)


def test_the_same_birth_in_identical_blocks_is_told_once():
    audit = make_audit(60)
    refused = NodeError(unsupported="no kernel", cause="unsupported", born=True)
    nodes = tuple(
        replace(r, errors={**r.errors, "fp16": refused}) if r.node.op == "aten.softmax.int" else r for r in audit.nodes
    )
    found = origins(replace(audit, nodes=nodes), "fp16").births
    softmax = next(b for b in found if b.report.node.op == "aten.softmax.int")
    assert softmax.times == sum(r.node.op == "aten.softmax.int" for r in nodes)
    assert softmax.report.node.owner == "blocks.0.attn"
    page = html.render(replace(audit, nodes=nodes))
    assert "Does not run:" in page
    assert f"and in {softmax.times - 1} blocks like it" in page


def test_what_no_strategy_lowers_makes_no_error():
    audit = make_audit()
    top = origins(audit, "bf16").sources[0].report.node.name
    raised = tuple(replace(r, exposed={**r.exposed, "bf16": ()}) if r.node.name == top else r for r in audit.nodes)
    found = origins(replace(audit, nodes=raised), "bf16").sources
    assert top not in [source.report.node.name for source in found]
    assert origins(replace(audit, nodes=raised), "fp16").sources == origins(audit, "fp16").sources
