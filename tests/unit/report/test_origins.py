"""Where errors begin: births and heirs, what adds most, flagged regions, and what became of predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from auditor.records import FlaggedRegion, Linearity, NodeError
from auditor.report.blocks import Lines, Table, html
from auditor.report.origins import origins
from tests.unit.report.factory import make_audit


def region(scope: str, error: float | None, *, fmt: str = "fp16", size: int = 2, failure: str | None = None):
    return FlaggedRegion(fmt, tuple(f"n{i}" for i in range(size)), scope, error, error, 0.001, failure)


def tables(audit, words: str) -> list[Table]:
    return [block for block in origins(audit) if isinstance(block, Table) and words in block.caption]


def said(audit) -> list[str]:
    return [text for block in origins(audit) if isinstance(block, Lines) for text in block.texts]


def test_regions_are_ranked_and_single_operations_left_out():
    found = (
        region("small", 0.1),
        region("alone", 0.9, size=1),
        region("other", 0.9, fmt="bf16"),
        region("broken", math.nan, failure="no kernel <here>"),
        region("large", 0.5),
    )
    audit = replace(make_audit(30), regions=found)
    ranked, _ = tables(audit, "lowered together")
    assert [row[0].split("`")[1] for row in ranked.rows] == ["broken", "large", "small"]
    assert ranked.rows[0][2] == "does not run"
    assert "no kernel &lt;here&gt;" in html(origins(audit))
    assert not tables(make_audit(30), "lowered together")


def test_the_same_birth_in_identical_blocks_is_told_once():
    audit = make_audit(60)
    refused = NodeError(unsupported="no kernel", cause="unsupported", born=True)
    softmax = "aten.softmax.int"
    nodes = tuple(replace(r, errors={**r.errors, "fp16": refused}) if r.node.op == softmax else r for r in audit.nodes)
    blocks = sum(r.node.op == softmax for r in nodes)
    (one,) = (text for text in said(replace(audit, nodes=nodes)) if "softmax" in text)
    assert one.startswith("Does not run: `blocks.0.attn` softmax") and f"and in {blocks - 1} blocks like it" in one


def test_what_adds_most_comes_first_and_what_no_strategy_lowers_adds_nothing():
    audit = make_audit(8)
    _, bf16 = tables(audit, "add most rounding error")
    shares = [float(row[2].strip("<>%")) for row in bf16.rows]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=5)  # 7 operations have a contribution, all are shown
    raised = tuple(replace(r, exposed={**r.exposed, "bf16": ()}) for r in audit.nodes)
    assert len(tables(replace(audit, nodes=raised), "add most rounding error")) == 1


FOUND = Linearity("bf16", 12, 0.5, 1.25, 9.75, False, None, None, confirmed=3, refuted=1, left=0)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            FOUND,
            "12 operations predicted to first order were also run: prediction / measurement 0.5 to 9.8, median 1.2. First order "
            "does not hold on this model, so more operations were run. Runs confirm 3 of 4 predictions beyond the budget.",
        ),
        (
            Linearity("bf16", 1, 1.1, 1.1, 1.1, True, None, None, confirmed=1, refuted=0, left=1),
            "1 operation predicted to first order was also run: prediction / measurement 1.1 to 1.1, median 1.1. Runs confirm 1 of "
            "1 prediction beyond the budget. 1 more is beyond it by prediction alone.",
        ),
    ],
)
def test_what_became_of_predictions(found: Linearity, sentence: str) -> None:
    assert sentence in said(replace(make_audit(20), linearity=(found,)))
    assert sentence not in said(make_audit(20))
