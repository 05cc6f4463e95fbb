"""Two audits compared: what counts as new, as gone, as changed; and documents that cannot be compared."""

import copy
import json
import math
from dataclasses import replace

import pytest

from auditor.document.codec import to_document
from auditor.document.compare import BAND, VerdictChange, compare, contributions_of, figures, fresh, regressions
from auditor.document.read import audit_of
from auditor.records import Contribution, Finding
from tests.unit.report.factory import make_audit


@pytest.fixture(scope="module")
def document():
    """Both files in one."""
    return json.loads(json.dumps(to_document(make_audit(60))))


@pytest.fixture
def other(document):
    return copy.deepcopy(document)


def compared(before, after):
    return compare(audit_of(before, "a"), audit_of(after, "b"))


def known(rule="SFT001", owner="blocks.0.attn", severity="warning", message="m", source="model.py:1", **more):
    of = {"op": "aten.softmax.int", "confidence": "high", "formats": (), **more}
    return Finding(
        rule=rule, name="a-name", node="softmax", owner=owner, severity=severity, message=message, source=source, **of
    )


def holding(*findings, contribution=None, max_error=0.01):
    """An audit with these findings and, of their operation in FP16, this contribution."""
    return replace(make_audit(empty=True), findings=findings, contributions=at(contribution), max_error=max_error)


def at(contribution):
    return {} if contribution is None else {"fp16": {"blocks.0.attn": {"aten.softmax.int": contribution}}}


def new(before, after, was=None, now=None, max_error=0.01):
    return fresh(holding(*before, contribution=was), holding(*after, contribution=now, max_error=max_error))


def test_findings_new_and_gone(document, other):
    same = compared(document, document)
    assert (same.new, same.gone, same.verdicts, same.caveats) == ((), (), (), ())
    assert same.unchanged_findings == len(document["findings"])
    assert all(figures(before) == figures(after) for _, before, after in same.plans)
    lost = other["findings"].pop(0)
    found, back = compared(document, other), compared(other, document)
    assert ([f.owner for f in found.gone], found.new) == ([lost["owner"]], ())
    assert ([f.owner for f in back.new], back.unchanged_findings) == ([lost["owner"]], len(other["findings"]))


def test_each_known_finding_stands_for_one():
    twice = [known(), known(source="model.py:2")]
    assert new([known()], twice) == (twice[1],)
    assert new(twice, twice) == ()


MEASURED = known("MSR001", formats=("fp16",), agrees=True)


def test_what_the_measurement_says_is_new_where_the_contribution_has_more_than_doubled():
    for was, now, count in (0.0099, 0.0101, 0), (0.006, 0.0119, 0), (0.006, 0.0121, 1):
        assert len(new([], [MEASURED], was, now)) == count
    assert new([], [MEASURED], 0.0099, 0.0101, max_error=0.001) == (MEASURED,)  # another budget excuses nothing


def severity(before, after, agrees=(None, None), formats=(), **contributions):
    """Whether a finding that was that severe is new where it is so severe now."""
    was, now = (known(severity=s, agrees=a, formats=formats) for s, a in zip((before, after), agrees, strict=True))
    return new([was], [now], **contributions) != ()


def test_a_finding_that_grew_worse_is_new_but_not_for_the_plans_sake_alone():
    assert severity("warning", "error")
    assert not severity("error", "warning")
    assert not severity("info", "warning", (True, True), ("fp16",))
    assert severity("info", "error", (True, True), ("fp16",))
    assert severity("info", "warning", (False, True), ("fp16",), was=0.002, now=0.0041)
    assert not severity("info", "warning", (False, True), ("fp16",), was=0.0024, now=0.0026)


def test_verdicts_follow_their_operation_when_names_of_nodes_shift(document, other):
    for node in other["nodes"]:
        node["node"]["name"] += "_shifted"
    changed = next(n for n in other["nodes"] if n["verdicts"]["fp16"]["verdict"] == "safe")
    changed["verdicts"]["fp16"]["verdict"] = "unsafe"
    (change,) = compared(document, other).verdicts
    assert (change.node.owner, change.format) == (changed["node"]["owner"], "fp16")
    assert (change.before, change.after) == ("safe", "unsafe")


def test_plans_are_paired_by_name(document, other):
    del other["plans"]["cast_bf16"]
    other["plans"]["autocast_fp16"]["verification"]["measured_error"] = 0.5
    pairs = {name: (before, after) for name, before, after in compared(document, other).plans}
    assert pairs["cast_bf16"][1] is None
    assert pairs["autocast_fp16"][0].measured_error == pytest.approx(0.00083)
    assert pairs["autocast_fp16"][1].measured_error == 0.5
    assert pairs["autocast_fp16"][0].islands == 2  # RNG001's module and the last norm


def test_settings_that_differ_are_said(document, other):
    other["max_error"] = 0.5
    other["environment"]["torch"] = "9.9"
    assert [(what, after) for what, _, after in compared(document, other).caveats] == [
        ("budget", "0.5 relative L2 of the outputs"),
        ("torch", "9.9"),
    ]


def test_what_got_worse_is_told_and_what_did_not_is_not(document, other):
    assert regressions(compared(document, other)) == []
    name = other["recommended"]
    other["plans"][name]["verification"]["measured_error"] *= 5
    other["plans"][name]["predicted_speedup"] *= 0.5
    told = regressions(compared(document, other))
    assert told[0] == "error 5.0 times as large as before"
    assert [line.split()[0] for line in told] == ["error", "speed-up"]
    assert regressions(compared(other, document)) == []
    other["recommended"] = None
    assert f"{name} was recommended before, no plan now" in regressions(compared(document, other))


def test_new_findings_and_verdicts_of_unsafe_are_told():
    audit = make_audit(20)
    node, finding = audit.nodes[0].node, audit.findings[0]
    changes = [VerdictChange(node, "fp16", before, after) for before in ("safe", None) for after in ("unsafe", "safe")]
    new = [replace(finding, severity=severity) for severity in ("error", "error", "info")]
    assert regressions(replace(compare(audit, audit), new=tuple(new), verdicts=tuple(changes))) == [
        f"new findings of severity error: 2 ({finding.rule})",
        "operations that became unsafe: 1",
    ]


def test_contributions_below_an_eighth_of_the_budget_are_left_out() -> None:
    audit = make_audit(20)  # budget 0.01: sensitive beyond 0.0025, and half of that is 0.00125
    node = audit.nodes[3]
    for value, kept in ((0.00124, None), (0.00126789, 0.00127), (math.nan, math.inf)):
        moved = replace(node, contributions={"fp16": Contribution(value, 0.0, 0.0)})
        found = contributions_of(replace(audit, nodes=(moved,)))
        assert found.get("fp16", {}).get(node.node.owner, {}).get(node.node.op) == kept
    assert BAND == 2
