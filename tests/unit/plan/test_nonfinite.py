"""Baselines and plans that are not finite get their first operation, from a run of the graph on the batch that shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auditor.plan.nonfinite import locate, locate_in_plans, unsafe_in_runs
from auditor.records import Baseline, Plan, ScopeChoice, Verdict, Verification
from auditor.rulebook.verdicts import Judgement
from tests.support.capturing import Function, captured
from tests.support.findings import finding

NAN = Baseline(None, False)
FINE, LARGE = (torch.ones(4),), (torch.full((4,), 300.0),)


def square(x):
    return (x * x).relu()


@pytest.fixture(scope="module")
def bench() -> Any:
    model = Function(square)
    capture = captured(model, *FINE).capture
    batches = [(FINE, {}), (LARGE, {})]
    mul = next(node for node in capture.nodes.values() if node.op == "aten.mul.Tensor")

    findings = [
        finding("MSR001", mul.name, formats=("fp16",)),
        finding("ACT005", mul.name, formats=("fp16",)),
        finding("ACT003", mul.name, formats=("bf16",)),
    ]
    subject = SimpleNamespace(model=model, batches=batches)
    return SimpleNamespace(capture=capture, subject=subject, checks=batches, usable=list, findings=findings)


def test_the_batch_that_shows_it_is_looked_for_and_the_rule_that_fired(bench):
    first = locate(bench, {"cast_fp16": NAN})["cast_fp16"].nonfinite
    assert (first.op, first.value, first.cause, first.rules) == ("aten.mul.Tensor", "Inf", "overflow", ("ACT005",))
    assert first.batch == 2


def test_programs_with_everything_low_go_by_the_recorded_graph(bench):
    assert locate(bench, {"graph_fp16": NAN})["graph_fp16"].nonfinite.op == "aten.mul.Tensor"


@pytest.mark.parametrize("base", [Baseline(0.1, True), Baseline(None, False, "it raised")])
def test_what_is_finite_or_did_not_run_stays_as_it_is(bench, base):
    assert locate(bench, {"cast_fp16": base}) == {"cast_fp16": base}


def test_a_run_that_the_graph_does_not_show_has_none(bench):
    assert locate(bench, {"cast_bf16": NAN})["cast_bf16"].nonfinite is None


def plan(ran: Verification, precision: str = "fp16") -> Plan:
    return Plan("cast_fp16", "cast", "fp16", {"": ScopeChoice(precision)}, 0.0, 1.0, 1.0, verification=ran)


def test_plans_alike(bench):
    ran = Verification(None, False, "audited", "emulated")
    found = locate_in_plans(
        bench,
        {
            "low": plan(ran),
            "fp32": plan(ran, "fp32"),
            "raised": plan(Verification(None, False, "audited", "emulated", "no")),
        },
    )
    operations = {name: one.verification.nonfinite and one.verification.nonfinite.op for name, one in found.items()}
    assert operations == {"low": "aten.mul.Tensor", "fp32": None, "raised": None}


def test_the_operation_is_unsafe_unless_it_is_already(bench):
    baselines = locate(bench, {"cast_fp16": NAN, "cast_bf16": NAN})
    node = baselines["cast_fp16"].nonfinite.node
    safe = Verdict("safe", "")
    judged = Judgement({name: {"fp16": safe, "bf16": safe} for name in bench.capture.nodes}, {})
    whole = unsafe_in_runs(judged, baselines)
    reason = "Inf in FP16 with cast weights, though not alone: overflow (batch 2)"
    assert whole.verdicts[node] == {"fp16": Verdict("unsafe", reason, "range", 2), "bf16": safe}
    assert unsafe_in_runs(whole, baselines) is whole
    assert unsafe_in_runs(judged, {"cast_bf16": NAN}) is judged
