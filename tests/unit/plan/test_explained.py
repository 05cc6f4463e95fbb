"""A plan with its reasons: rules first, then the clause, in the scopes of the plan."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auditor.execution.policy import Policy, choice_from_scopes, plain
from auditor.plan.costs import Cost
from auditor.plan.mincut import Candidate
from auditor.plan.modules import as_candidate, as_plan, evaluate
from auditor.plan.problem import Problem
from auditor.plan.reasons import improve, with_reasons
from auditor.plan.search import MARGIN
from auditor.plan.verified import judge_replay, locate_nonfinite, mark_unsafe
from auditor.records import Plan, Verdict, Verification
from auditor.rulebook.verdicts import Judgement
from tests.support.capturing import Function, captured
from tests.support.findings import finding
from tests.support.planning import Foretold
from tests.support.problems import drawn


@pytest.fixture
def found() -> tuple[Plan, Problem, str]:
    """A chain of five layers; the one in the middle is unsafe, the one behind it stays FP32 too."""
    drawn_ = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    bad = next(name for name, node in drawn_.capture.nodes.items() if node.owner == "2")
    problem = replace(drawn_, verdicts={**drawn_.verdicts, bad: Verdict("unsafe", "it overflows")})
    plan = as_plan(problem, evaluate(problem, ("2", "3")))
    rules = (finding("SFT001", bad), finding("ATT001", bad), finding("BND001", bad, formats=("bf16",)))
    return with_reasons(Foretold(problem, 0.5), plan, rules), problem, bad


def test_every_fp32_scope_says_why_and_what_lowering_it_would_save(found: tuple[Plan, Problem, str]) -> None:
    plan, problem, bad = found
    (unsafe,), (other,) = plan.reasons_of("2"), plan.reasons_of("3")
    assert (unsafe.kind, unsafe.words) == ("unsafe", f"{bad} is unsafe: it overflows")
    assert (unsafe.rules, other.rules) == (("ATT001", "SFT001"), ())  # BND001 is about BF16
    assert plan.reasons_of("") == ()
    both, one = evaluate(problem, ("2", "3")), evaluate(problem, ("3",))
    assert unsafe.saves == pytest.approx(max(1 - one.cost / both.cost, 0.0))  # of what is forbidden too
    assert plan.kept_modules == ("2", "3")


def costing(problem: Problem, cost: Cost) -> Problem:
    return replace(problem, costs=dict.fromkeys(problem.costs, cost))


@pytest.mark.parametrize("holds", [True, False])
def test_all_low_is_what_its_own_run_says(holds: bool) -> None:
    """The graph may hold on its batches where the model does not on those that plans are verified on."""
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(0, 0, True))
    low = evaluate(problem, ())
    space = Foretold(problem, 0.5, off=1e-3, known=[] if holds else [(low, 0.6)])
    found = with_reasons(space, as_plan(problem, space.nothing), ())
    idle = [reason for reason in found.reasons if reason.kind == "no-gain"]
    assert idle
    assert (found.least == ()) == holds
    assert all(("if used only there" in reason.words) != holds for reason in idle)


def test_a_reason_of_no_gain_names_no_rules() -> None:
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(0, 0, True))
    problem = replace(problem, verdicts=dict.fromkeys(problem.verdicts, Verdict("sensitive", "")))
    rules = [finding("BND002", name) for name in problem.capture.nodes]
    space = Foretold(problem, 0.5)
    idle = [r for r in with_reasons(space, as_plan(problem, space.nothing), rules).reasons if r.kind == "no-gain"]
    assert idle and not any(reason.rules for reason in idle)


def test_what_saves_less_than_one_more_change_of_precision_must_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.plan.problem.ISLAND_SHARE", 1.0)
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(10**12, 1000, False))
    space = Foretold(problem, 1.0)
    (reason,) = [reason for reason in with_reasons(space, as_plan(problem, space.nothing), ()).reasons if reason.saves]
    share = f"{reason.saves:.1%} of the time"  # alike, so that what saves most is each of them
    assert (
        reason.words
        == f"low precision saves at most {share} there, below the threshold for one more change of precision"
    )


def test_a_plan_is_what_it_was_made_from() -> None:
    problem = drawn("branches", "cast", random.Random(1), unsafe=0.0)
    chosen = evaluate(problem, ("a",))
    assert as_candidate(problem, choice_from_scopes(as_plan(problem, chosen).scopes)) == chosen


def half_low() -> tuple[Problem, Candidate]:
    """A chain every other layer of which is low; whatever is lowered gains."""
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(10**12, 1000, False))
    return problem, evaluate(problem, ("1", "3"))


def test_a_choice_is_improved_by_what_a_run_allows_and_by_no_more() -> None:
    problem, half = half_low()
    alone = {owner: evaluate(problem, half.high - {owner}).predicted_error for owner in "13"}
    both = evaluate(problem, ()).predicted_error
    least, most = sorted(alone, key=alone.__getitem__)
    assert half.predicted_error < alone[least] < alone[most] < both
    for target, left in ((both, set()), ((alone[least] + alone[most]) / 2, {most}), (half.predicted_error, {"1", "3"})):
        space = Foretold(problem, 1.0001 * target / MARGIN)
        assert improve(space, half, MARGIN * space.budget).high == left


def test_what_runs_say_is_what_the_reasons_say() -> None:
    problem, half = half_low()
    space = Foretold(problem, 1.0, off=2.0)
    one = evaluate(problem, ("3",))
    space.error(half), space.error(one)
    by_module = {
        path: each for each in with_reasons(space, as_plan(problem, half), ()).reasons for path in each.modules
    }
    assert (by_module["1"].ran, by_module["3"].ran) == (True, False)
    assert by_module["1"].adds == pytest.approx(2 * (one.predicted_error - half.predicted_error))


# A replay that is not finite has its first operation, from a run of the graph on the batch that shows it.

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
    return SimpleNamespace(
        capture=capture, subject=subject, checks=batches, usable=list, findings=findings, max_error=0.2
    )


def all_low(bench, fmt, precision=""):
    return Policy(bench.capture, "cast", plain(precision or fmt), fmt)


def test_the_batch_that_shows_it_is_looked_for_and_the_rule_that_fired(bench):
    first = locate_nonfinite(bench, all_low(bench, "fp16"))
    assert (first.op, first.value, first.cause, first.rules) == ("aten.mul.Tensor", "Inf", "overflow", ("ACT005",))
    assert first.batch == 2


def test_a_replay_that_is_finite_has_none(bench):
    assert judge_replay(bench, 0.1, all_low(bench, "fp16")) == Verification(0.1, True)
    ran = judge_replay(bench, math.nan, all_low(bench, "fp16"))
    assert (ran.measured_error, ran.finite, ran.nonfinite) == (
        None,
        False,
        locate_nonfinite(bench, all_low(bench, "fp16")),
    )


@pytest.mark.parametrize(("fmt", "precision"), [("bf16", ""), ("fp16", "fp32")])
def test_a_run_that_the_graph_does_not_show_has_none(bench, fmt, precision):
    assert locate_nonfinite(bench, all_low(bench, fmt, precision)) is None


def test_the_operation_is_unsafe_unless_it_is_already(bench):
    baselines = {f"cast_{fmt}": judge_replay(bench, math.nan, all_low(bench, fmt)) for fmt in ("fp16", "bf16")}
    node = baselines["cast_fp16"].nonfinite.node
    safe = Verdict("safe", "")
    judged = Judgement({name: {"fp16": safe, "bf16": safe} for name in bench.capture.nodes}, {})
    whole = mark_unsafe(judged, baselines)
    reason = "Inf in FP16 with cast weights, though finite by itself: overflow (batch 2)"
    assert whole.verdicts[node] == {"fp16": Verdict("unsafe", reason, "range", 2), "bf16": safe}
    assert mark_unsafe(whole, baselines) is whole
    assert mark_unsafe(judged, {"cast_bf16": Verification(None, False)}) is judged
