"""A plan with its reasons: rules first, then the clause, in the scopes of the plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch import nn

from auditor.cache.kept import Met
from auditor.plan import explained as explained_module
from auditor.plan import reasons as reasons_module
from auditor.plan.choose import as_plan, simulated_error
from auditor.plan.explained import as_candidate, explained
from auditor.plan.problem import Problem
from auditor.plan.solve import Candidate, evaluate
from auditor.records import Finding, Plan, Verdict
from tests.planning import bench_of
from tests.problems import drawn
from tests.subjects import normal, seeded


def finding(rule: str, node: str, formats: tuple[str, ...] = ("fp16", "bf16")) -> Finding:
    return Finding(rule, "", node, "", "", None, "warning", "high", formats, "", "", "")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, str]:
    """A chain of five layers; the one in the middle is unsafe, the one behind it stays FP32 too."""
    monkeypatch.setattr(explained_module, "simulated_error", lambda problem, point, trial: point.predicted_error)
    monkeypatch.setattr(explained_module, "_beside", lambda problem, chosen, trial: trial)
    drawn_ = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    bad = next(name for name, node in drawn_.capture.nodes.items() if node.owner == "2")
    problem = replace(drawn_, verdicts={**drawn_.verdicts, bad: Verdict("unsafe", "it overflows")})
    plan = as_plan(problem, evaluate(problem, {"": "fp16", **dict.fromkeys("014", "fp16"), "2": "fp32", "3": "fp32"}))
    rules = (finding("SFT001", bad), finding("ATT001", bad), finding("BND001", bad, ("bf16",)))
    trial = None
    return explained(problem, plan, trial, 0.5, 0.4, rules).whole, bad  # type: ignore[arg-type]


def test_every_fp32_scope_says_why(found: tuple[Plan, str]) -> None:
    plan, bad = found
    assert plan.scopes["2"].because == ("ATT001", "SFT001", f"{bad} is unsafe: it overflows")  # BND001 is about BF16
    assert len(plan.scopes["3"].because) == 1
    assert plan.scopes[""].because == ()
    assert {reason.kind for reason in plan.reasons if "2" in reason.modules} == {"unsafe"}
    assert plan.kept == ("2", "3")


def test_what_must_stay_is_what_is_unsafe(found: tuple[Plan, str]) -> None:
    plan, _ = found
    other = next(reason for reason in plan.reasons if "3" in reason.modules)
    assert plan.least == (("2",) if other.kind == "no-gain" else ("2", "3"))


@pytest.mark.parametrize(("all_low", "holds"), [(None, True), (0.4, True), (0.6, False), (float("inf"), False)])
def test_all_low_is_what_its_own_run_says(all_low: float | None, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph may hold on its batches where the model does not on those that plans are verified on."""
    monkeypatch.setattr(explained_module, "simulated_error", lambda problem, point, trial: 0.1)
    lowered = reasons_module._lowered
    monkeypatch.setattr(reasons_module, "_lowered", lambda *args: replace(lowered(*args), saves=0.0, gains=False))
    problem = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    plan = as_plan(problem, evaluate(problem, dict.fromkeys(problem.energy.scopes, "fp32")))
    found = explained(problem, plan, None, 0.5, 0.4, (), all_low).whole  # type: ignore[arg-type]
    idle = [reason for reason in found.reasons if reason.kind == "no-gain"]
    assert (found.least == ()) == holds
    assert all(reason.words.startswith("lowering it alone") != holds for reason in idle)


def test_a_plan_is_what_it_was_made_from() -> None:
    problem = drawn("branches", "cast", random.Random(1), unsafe=0.0)
    chosen = evaluate(problem, {owner: "fp32" if owner == "a" else "fp16" for owner in problem.energy.scopes})
    assert as_candidate(problem, as_plan(problem, chosen)) == chosen


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dear", [False, True])
def test_a_plan_is_run_once_more_only_where_that_saves_time(
    known: bool, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs begin from the plan's own; where it was made before without keeping it, and each is dear, they do not."""
    monkeypatch.setattr(explained_module, "heavy", lambda costs: dear)
    model, x = seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))), normal(4, 16)
    bench = bench_of(model, x)
    problem = bench.problem("cast", "bf16")
    chosen = evaluate(problem, {"": "bf16", "0": "bf16", "1": "fp32", "2": "bf16"})
    trial = replace(bench.trial(bench.checks), runs=(Met(),))
    if known:
        simulated_error(problem, chosen, trial)
    assert (explained_module._beside(problem, chosen, trial).beside is None) == (known and dear)


def test_what_has_to_stay_is_looked_for_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Candidate] = []

    def error(problem: Problem, point: Candidate, trial: object) -> float:
        asked.append(point)
        return point.predicted_error

    monkeypatch.setattr(explained_module, "simulated_error", error)
    monkeypatch.setattr(explained_module, "_beside", lambda problem, chosen, trial: trial)
    monkeypatch.setattr(explained_module, "least", lambda *rest: (str(len(asked)),))
    problem = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    plan = as_plan(problem, evaluate(problem, {"": "fp16", **dict.fromkeys("014", "fp16"), "2": "fp32", "3": "fp32"}))
    found = explained(problem, plan, None, 0.5, 0.4, ())  # type: ignore[arg-type]
    assert found.plan.least is None and found.plan.reasons
    asked.clear()
    assert found.whole == replace(found.plan, least=("0",))
