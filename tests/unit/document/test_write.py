"""plan.json is strict JSON, whatever was measured, and the same audit gives the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest

from auditor.document.contents import digest
from auditor.document.read import read_audit
from auditor.document.write import finite, number, plain, texts, to_document, to_measurements, to_plan, written
from auditor.records import FORMAT_VERSION, Contribution, NodeError, Plan, Reason, ScopeChoice
from auditor.records.written import Written
from tests.unit.report.factory import make_audit

KINDS: list[dict[str, Any]] = [
    {},
    {"nodes": 60, "hostile": True, "synthetic": True},
    {"empty": True},
    {"nodes": 30, "formats": ("bf16",), "recommended": None},
]


def text_of(**kind: Any) -> str:
    return json.dumps(to_document(make_audit(**kind)), indent=1, allow_nan=False)


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_has_its_share_and_together_they_have_everything(kind: dict[str, Any]) -> None:
    audit = make_audit(**kind)
    plan, measured, whole = to_plan(audit), to_measurements(audit), to_document(audit)
    assert {name: json.loads(text) for name, text in texts(audit).items()} == {
        "plan.json": json.loads(json.dumps(plan)),
        "measurements.json": json.loads(json.dumps(measured)),
    }
    assert plan.keys() | measured.keys() == whole.keys() | {"plan", "not_finite", "contributions"}
    assert not plan.keys() & {"nodes", "weights", "regions"}
    assert {name: {**plan["plans"][name], **measured["plans"][name]} for name in plan["plans"]} == whole["plans"]
    assert measured["findings"] == whole["findings"]
    assert measured["plan"] == digest(json.loads(texts(audit)["plan.json"]))
    assert sum(1 + len(kind["also_in"]) for kind in plan["findings"]) == len(whole["findings"])


def test_a_plan_of_five_hundred_operations_is_small() -> None:
    audit = make_audit(500)
    assert len(audit.nodes) > 490
    assert len(texts(audit)["plan.json"]) < 60_000


def test_a_reason_holds_what_it_has_to_say_and_reads_back() -> None:
    reason = Reason("inherited", "it is handed FP32 by add", operations=("add_1",), by="add")
    budget = Reason("budget", "b", modules=("head",), adds=0.0, left=0.01, saves=0.02, ran=True)
    audit = make_audit()
    plans = {name: replace(plan, reasons=(reason, budget)) for name, plan in audit.plans.items()}
    document = to_plan(replace(audit, plans=plans))
    first, second = next(iter(document["plans"].values()))["reasons"]
    assert first == {"kind": "inherited", "words": reason.words, "operations": ["add_1"], "by": "add"}
    assert second.keys() == {"kind", "words", "modules", "adds", "left", "saves", "ran"}
    read = next(iter(read_audit(document, "x").plans.values())).reasons
    assert [(r.by, r.adds, r.ran, tuple(r.modules)) for r in read] == [
        (r.by, r.adds, r.ran, r.modules) for r in (reason, budget)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_strict_json_and_the_same_bytes_twice(kind: dict[str, Any]) -> None:
    first, second = text_of(**kind), text_of(**kind)
    assert first == second
    assert json.loads(first)["format_version"] == FORMAT_VERSION == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None])
def test_what_is_not_finite_becomes_null_and_is_pointed_at(value: float | None) -> None:
    assert number(value) is value
    odd: dict[str, list[str]] = {}
    assert finite({"a/b": [{"~": value}]}, odd) == {"a/b": [{"~": None}]}
    assert odd == ({} if value is None else {str(value): ["/a~1b/0/~0"]})


def test_seven_digits_are_kept() -> None:
    assert number(0.123456789) == 0.1234568
    assert number(1.0) == 1.0
    assert number(1e-300) == 1e-300
    assert number(65504.0) == 65504.0


def test_evidence_becomes_plain_data() -> None:
    evidence = {"length": 3, "values": (1.5, math.inf), "nested": {1: {math.nan}}, "flag": True, "odd": object}
    assert finite(plain(evidence), {}) == {
        "length": 3,
        "values": [1.5, None],
        "nested": {"1": [None]},
        "flag": True,
        "odd": str(object),
    }


def test_a_plan_of_infinities() -> None:
    audit = make_audit()
    plan = Plan(
        "autocast_fp16",
        "autocast",
        "fp16",
        {"": ScopeChoice("fp16"), "norm": ScopeChoice("fp32", ("NRM001",), "keep", 0.25)},
        math.inf,
        1.0,
        2.0,
        measured_error=math.nan,
        pareto=((math.inf, 1.0), (0.0, math.nan)),
    )
    found = to_document(replace(audit, plans={"autocast_fp16": plan}))["plans"]["autocast_fp16"]
    assert (found["predicted_error"], found["measured_error"]) == (None, None)
    assert found["pareto"] == [[None, 1.0], [0.0, None]]
    assert found["scopes"] == {
        "": {"precision": "fp16", "because": [], "output": "cast", "cost": None},
        "norm": {"precision": "fp32", "because": ["NRM001"], "output": "keep", "cost": 0.25},
    }


def test_a_node_of_infinities() -> None:
    audit = make_audit(nodes=10)
    report = next(report for report in audit.nodes if "fp16" in report.errors)
    broken = replace(
        report,
        errors={"fp16": NodeError(local_error=math.inf, max_ulp=math.nan, sqnr_db=-math.inf, overflow=3, born=True)},
        contributions={"fp16": Contribution(math.inf, math.nan, 0.0, "re-run")},
    )
    (node,) = to_document(replace(audit, nodes=(broken,)))["nodes"]
    fp16 = node["fp16"]
    assert (fp16["local_error"], fp16["max_ulp"], fp16["sqnr_db"], fp16["contribution"]) == (None, None, None, None)
    assert (fp16["overflow"], fp16["born"], fp16["decided_by"]) == (3, True, "re-run")


def test_numbers_that_are_keys_are_written_short() -> None:
    @dataclass(frozen=True)
    class Scaled:
        by_scale: Annotated[Mapping[float, float], Written("what a loss scale does")]
        by_exponent: Annotated[Mapping[int, int], Written("how many")]

    found = written(Scaled({65536.0: 0.5, 1.0: 0.25}, {10: 1, -2: 3, 9: 4}))
    assert list(found["by_scale"].items()) == [("65536", 0.5), ("1", 0.25)]
    assert list(found["by_exponent"].items()) == [("-2", 3), ("9", 4), ("10", 1)]  # as numbers are sorted, not as text
