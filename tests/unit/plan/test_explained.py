"""A plan with its reasons: rules first, then the clause, in the scopes of the plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch import nn

from auditor.plan import explained as explained_module
from auditor.plan import reasons as reasons_module
from auditor.plan.choose import as_plan
from auditor.plan.explained import Explained, as_candidate
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
    monkeypatch.setattr(explained_module, "_beside", lambda problem, lowered, trial: trial)
    drawn_ = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    bad = next(name for name, node in drawn_.capture.nodes.items() if node.owner == "2")
    problem = replace(drawn_, verdicts={**drawn_.verdicts, bad: Verdict("unsafe", "it overflows")})
    plan = as_plan(problem, evaluate(problem, {"": "fp16", **dict.fromkeys("014", "fp16"), "2": "fp32", "3": "fp32"}))
    rules = (finding("SFT001", bad), finding("ATT001", bad), finding("BND001", bad, ("bf16",)))
    trial = None
    return Explained(problem, plan, trial, 0.5, 0.4, rules).whole, bad  # type: ignore[arg-type]


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
    monkeypatch.setattr(explained_module, "_beside", lambda problem, lowered, trial: trial)
    lowered = reasons_module._lowered
    monkeypatch.setattr(reasons_module, "_lowered", lambda *args: replace(lowered(*args), saves=0.0, gains=False))
    problem = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    plan = as_plan(problem, evaluate(problem, dict.fromkeys(problem.energy.scopes, "fp32")))
    found = Explained(problem, plan, None, 0.5, 0.4, (), all_low).whole  # type: ignore[arg-type]
    idle = [reason for reason in found.reasons if reason.kind == "no-gain"]
    assert (found.least == ()) == holds
    assert all(reason.words.startswith("lowering it alone") != holds for reason in idle)


def test_a_plan_is_what_it_was_made_from() -> None:
    problem = drawn("branches", "cast", random.Random(1), unsafe=0.0)
    chosen = evaluate(problem, {owner: "fp32" if owner == "a" else "fp16" for owner in problem.energy.scopes})
    assert as_candidate(problem, as_plan(problem, chosen)) == chosen


class Asked:
    """Stands in for runs: a module low adds what is predicted. points: all that were run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.points: list[Candidate] = []
        patch.setattr(explained_module, "simulated_error", self.error)
        patch.setattr(explained_module, "_beside", lambda problem, lowered, trial: trial)
        for module in (explained_module, reasons_module):
            patch.setattr(module, "heavy", lambda costs: False)

    def error(self, problem: Problem, point: Candidate, trial: object) -> float:
        self.points.append(point)
        return point.predicted_error


def half_low() -> tuple[Problem, Plan]:
    problem = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    return problem, as_plan(
        problem, evaluate(problem, {"": "fp16", **dict.fromkeys("014", "fp16"), **dict.fromkeys("23", "fp32")})
    )


@pytest.mark.parametrize("idle", [(), ("2",), ("3",), ("2", "3")])
def test_only_runs_that_bear_on_what_is_affordable_are_made_for_it(
    idle: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gains nothing is run with all of its kind once the plan is the last one, or to see which of the others are run."""
    asked, lowered = Asked(monkeypatch), reasons_module._lowered
    monkeypatch.setattr(
        reasons_module, "_lowered", lambda *args: replace(lowered(*args), gains=args[2] not in idle, saves=0.1)
    )
    problem, plan = half_low()
    found = Explained(problem, plan, None, 0.5, 0.4, ())  # type: ignore[arg-type]
    assert [point.precision for point in asked.points] == [as_candidate(problem, plan).precision]
    affordable = found.affordable(0.4)
    kept = {tuple(owner for owner in "23" if point.precision[owner] == "fp32") for point in asked.points[1:]}
    order = sorted("23", key=lambda owner: (-reasons_module._own_saving(problem, owner), owner))
    before = order[: max((order.index(owner) + 1 for owner in "23" if owner not in idle), default=0)]
    together = {tuple(owner for owner in "23" if owner not in idle)} if set(before) & {*idle} else set()
    assert kept == {("3",) if owner == "2" else ("2",) for owner in before if owner not in idle} | together
    whole = found.whole
    margin = {path for reason in whole.reasons if reason.kind == "margin" and reason.ran for path in reason.modules}
    assert set(affordable) == margin == {"2", "3"} - {*idle}
    assert Explained(problem, plan, None, 0.5, 0.4, ()).whole == whole  # type: ignore[arg-type]


def test_what_adds_too_much_is_not_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch)
    lowered = reasons_module._lowered
    monkeypatch.setattr(reasons_module, "_lowered", lambda *args: replace(lowered(*args), gains=True))
    problem, plan = half_low()
    own = as_candidate(problem, plan).predicted_error
    alone = {
        owner: evaluate(problem, {**as_candidate(problem, plan).precision, owner: "fp16"}).predicted_error
        for owner in "23"
    }
    least, most = sorted(alone, key=alone.__getitem__)
    assert own < alone[least] < alone[most]
    between = (alone[least] + alone[most]) / 2
    plan = replace(plan, measured_error=own)
    assert Explained(problem, plan, None, 1.0, 1.0, ()).affordable(between) == (least,)  # type: ignore[arg-type]
    assert Explained(problem, plan, None, between, 1.0, ()).affordable(1.0) == (least,)  # type: ignore[arg-type]
    worse = replace(plan, measured_error=own + alone[most] - alone[least])  # on the inputs it is verified on
    assert Explained(problem, worse, None, 1.0, 1.0, ()).affordable(between) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("dear", [False, True])
def test_runs_that_begin_from_one_another_say_the_same(dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runs are dear, only what is known to be read again is kept of the first."""
    monkeypatch.setattr(explained_module, "heavy", lambda costs: dear)
    model, x = seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))), normal(4, 16)
    bench = bench_of(model, x)
    problem = bench.problem("cast", "bf16")
    plan = as_plan(problem, evaluate(problem, {"": "bf16", **dict.fromkeys("024", "bf16"), "1": "fp32", "3": "fp32"}))
    found = Explained(problem, plan, bench.trial(bench.checks), 1.0, 0.5, ())
    assert found._trial.beside is not None and found._trial.beside.run is not None
    kept = len(found._trial.beside.run.values)
    assert kept < len(bench.capture.graph_module.graph.nodes) if dear else kept >= len(bench.capture.nodes)
    whole = found.whole
    found.pause()
    assert found._trial.beside.run is None
    monkeypatch.setattr(explained_module, "_beside", lambda problem, lowered, trial: trial)
    assert Explained(problem, plan, bench.trial(bench.checks), 1.0, 0.5, ()).whole == whole
