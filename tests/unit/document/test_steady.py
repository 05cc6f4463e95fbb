"""Contributions that are kept for the next audit, and what counts as moved."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from auditor.document.compared import Known, record
from auditor.document.steady import BAND, largest, unmoved, watched
from auditor.document.write import to_plan
from auditor.records import Contribution
from tests.unit.report.factory import make_audit


def finding(*formats: str) -> Known:
    return Known("MSR001", "n", "a.b", "op", "warning", "m", None, formats)


def test_the_largest_of_a_module_and_operation_is_kept_to_three_digits() -> None:
    each = [("fp16", "a", "op", 0.0123456), ("fp16", "a", "op", 0.001), ("bf16", "a", "op", math.nan)]
    assert largest(each) == {"fp16": {"a": {"op": 0.0123}}, "bf16": {"a": {"op": None}}}


def test_what_is_below_an_eighth_of_the_budget_is_left_out() -> None:
    audit = make_audit(20)  # budget 0.01: sensitive beyond 0.0025, and half of that is 0.00125
    node = audit.nodes[3]
    for value, kept in ((0.00124, None), (0.00126, 0.00126)):
        moved = replace(node, contributions={"fp16": Contribution(value, 0.0, 0.0)})
        found = watched(replace(audit, nodes=(moved,)))
        assert found.get("fp16", {}).get(node.node.owner, {}).get(node.node.op) == kept
    assert BAND == 2


def test_a_file_has_them_as_the_audit_does() -> None:
    audit = make_audit(60)
    assert record(json.loads(json.dumps(to_plan(audit))), "a").contributions == watched(audit)
    assert watched(audit)["fp16"]


def test_every_format_of_a_finding_has_to_have_stayed() -> None:
    before = largest([("fp16", "a.b", "op", 0.01), ("bf16", "a.b", "op", 0.01)])
    after = largest([("fp16", "a.b", "op", 0.015), ("bf16", "a.b", "op", 0.03)])
    steady = unmoved(before, after)
    assert steady(finding("fp16"))
    assert not steady(finding("bf16"))
    assert not steady(finding("fp16", "bf16"))
    assert not steady(finding("fp8_e4m3"))  # nothing is known of it
