"""Where runs are dear, what a plan could lower as well is run together, and reasons are run where a prediction leaves them open."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from auditor.plan import explained as explained_module
from auditor.plan import plans as plans_module
from auditor.plan import reasons as reasons_module
from auditor.plan.choose import MOST_OFF, as_plan
from auditor.plan.explained import Explained, as_candidate
from auditor.plan.problem import Problem
from auditor.plan.solve import Candidate, evaluate
from auditor.plan.workbench import Workbench
from auditor.records import Baseline, Plan, ScopeChoice
from tests.problems import drawn

Kept = tuple[str, ...]
OPEN = "23"
"""Modules of a chain of five that the plan keeps in FP32."""


class Runs:
    """Stands in for runs that are dear: each is as predicted, unless it is said here. kept: what stayed FP32 in each."""

    def __init__(self, patch: pytest.MonkeyPatch, **errors: float) -> None:
        self.kept: list[Kept] = []
        self.errors = errors
        patch.setattr(explained_module, "simulated_error", self.error)
        patch.setattr(explained_module, "_beside", lambda problem, lowered, trial: trial)
        lowered = reasons_module._lowered
        patch.setattr(reasons_module, "_lowered", lambda *args: replace(lowered(*args), gains=True))
        for module in (explained_module, reasons_module):
            patch.setattr(module, "heavy", lambda costs: True)

    def error(self, problem: Problem, point: Candidate, trial: object) -> float:
        kept = tuple(owner for owner in OPEN if point.precision[owner] == "fp32")
        self.kept.append(kept)
        return self.errors.get("kept_" + "".join(kept), point.predicted_error)


def half_low() -> tuple[Problem, Plan, dict[str, float]]:
    """A plan that keeps two of five layers, and what is predicted where these are low too: the plan, one of them, both."""
    problem = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    low = {"": "fp16", **dict.fromkeys("01234", "fp16")}
    points = {kept: evaluate(problem, {**low, **dict.fromkeys(kept, "fp32")}) for kept in ("23", "2", "3", "")}
    return problem, as_plan(problem, points["23"]), {kept: point.predicted_error for kept, point in points.items()}


def explained(budget: float, target: float | None = None) -> Explained:
    problem, plan, _ = half_low()
    return Explained(problem, plan, None, budget, target or budget, ())  # type: ignore[arg-type]


def test_what_is_predicted_to_be_affordable_is_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    found = explained(1.0)
    assert found.affordable(1.0) == ("2", "3")
    assert runs.kept == [("2", "3"), ()]


def test_what_does_not_hold_together_is_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, kept_=2.0, kept_2=2.0)
    assert explained(1.0).affordable(1.0) == ("2",)
    assert runs.kept == [("2", "3"), (), ("3",), ("2",)] or runs.kept == [("2", "3"), (), ("2",), ("3",)]


def test_what_holds_alone_and_not_together_is_not_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    Runs(monkeypatch, kept_=2.0)
    assert explained(1.0).affordable(1.0) == ()


def test_what_was_run_is_what_its_reason_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction that there is room is held against a run, and the reason says what that came to."""
    _, _, predicted = half_low()
    worse = {f"kept_{kept}": predicted["23"] * 1.5 for kept in ("2", "3")}
    Runs(monkeypatch, kept_=2.0, **worse)
    found = explained(1.0, predicted[""] * 1.01)
    assert found.affordable(predicted[""] * 1.01) == ()
    told = [reason for reason in found.whole.reasons if reason.kind == "margin" and reason.ran]
    assert {path for reason in told for path in reason.modules} == {*OPEN}
    assert all(f"to {predicted['23'] * 1.5:.2g}" in reason.words for reason in told)


def test_one_module_alone_keeps_within_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of several that each keep within it, all together need not."""
    _, _, predicted = half_low()
    target = (predicted["2"] + predicted["3"]) / 2
    better, low = ("2", "kept_3") if predicted["3"] < predicted["2"] else ("3", "kept_2")
    with monkeypatch.context() as patch:
        Runs(patch)
        assert explained(1.0).affordable(target) == (better,)
    Runs(monkeypatch, **{low: target * 1.01})
    assert explained(1.0).affordable(target) == ()


def test_behind_those_that_gain_most_others_are_taken_that_keep_within_the_target_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, _, predicted = half_low()
    monkeypatch.setattr(reasons_module, "FEW_RUNS", 1)
    Runs(monkeypatch)
    order = sorted(OPEN, key=lambda owner: (-reasons_module._own_saving(problem, owner), owner))
    added = {predicted[""]: 0.4}
    monkeypatch.setattr("auditor.plan.affordable.adds_to", lambda point, chosen, limits: added.get(point, 0.2))
    for room, found in ((0.41, ("2", "3")), (0.39, (order[0],))):
        assert explained(1.0).affordable(predicted["23"] + room) == found


def test_what_is_predicted_to_add_a_little_too_much_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, predicted = half_low()
    least = min(predicted["2"], predicted["3"])
    for off in (0.5, 2 / MOST_OFF):  # what it adds, of what there is room for
        target = predicted["23"] + (least - predicted["23"]) * off
        with monkeypatch.context() as patch:
            runs = Runs(patch, kept_2=predicted["23"], kept_3=predicted["23"], kept_=2.0)
            assert explained(1.0).affordable(target) in (("2",), ("3",), ())
            assert () not in runs.kept
            assert len(runs.kept) > 1
    target = predicted["23"] + (least - predicted["23"]) / (2 * MOST_OFF)
    runs = Runs(monkeypatch, kept_2=predicted["23"], kept_3=predicted["23"])
    assert explained(1.0).affordable(target) == ()
    assert runs.kept == [("2", "3")]


def test_nothing_is_run_where_nothing_is_left_or_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    _, _, predicted = half_low()
    assert explained(1.0).affordable(predicted["23"] / 2) == ()
    assert runs.kept == [("2", "3")]
    lowering = reasons_module.lowering
    dearer = lambda *args: replace(lowering(*args), cost=as_candidate(*half_low()[:2]).cost)  # noqa: E731
    monkeypatch.setattr("auditor.plan.affordable.lowering", dearer)
    assert explained(1.0).affordable(1.0) == ()
    assert runs.kept == [("2", "3")] * 2


def test_only_the_first_reason_is_run_and_what_a_prediction_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _, predicted = half_low()
    order = sorted(OPEN, key=lambda owner: (-reasons_module._own_saving(problem, owner), owner))
    second = "2" if order[1] == "3" else "3"  # what stays where the second one is low
    added = predicted[second] - predicted["23"]
    for share, ran in (
        (1.01 * MOST_OFF, {order[0]}),
        (1.0, {*order}),
        (0.99 / MOST_OFF, {order[0]}),
    ):  # of what it adds
        with monkeypatch.context() as patch:
            runs = Runs(patch)
            whole = explained(predicted["23"] + added * share).whole
            assert {path for reason in whole.reasons if reason.ran for path in reason.modules} == ran, share
            assert [("predicted" in reason.words) for reason in whole.reasons if order[1] in reason.modules] == [
                order[1] not in ran
            ]
            assert runs.kept[0] == ("2", "3")


BASE = Plan("cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16"), "a": ScopeChoice("fp32")}, 0.0, 1.0, 2.0)


@pytest.mark.parametrize(("holds", "verified"), [(True, ["low"]), (False, ["low", "made"])])
@pytest.mark.parametrize("dear", [True, False])
def test_a_plan_is_verified_once_with_what_is_affordable_low(
    dear: bool, holds: bool, verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was made as is verified where the other one does not hold; where runs are cheap, that comes first."""
    steps: list[str] = []

    def verify(bench: Any, plans: dict[str, Plan], tick: Any) -> dict[str, Plan]:
        steps.extend("low" if "low" in plan.note else "made" for plan in plans.values())
        return {n: replace(p, measured_error=0.001, verified=holds or "low" not in p.note) for n, p in plans.items()}

    made: Callable[..., Any] = lambda *rest: SimpleNamespace(  # noqa: E731
        affordable=lambda target: ("a",), pause=lambda: steps.append("paused")
    )
    monkeypatch.setattr(plans_module, "heavy", lambda costs: dear)
    monkeypatch.setattr(plans_module, "verify", verify)
    monkeypatch.setattr(plans_module, "Explained", made)
    monkeypatch.setattr(plans_module, "with_low", lambda problem, plan, paths: replace(plan, note="low"))
    monkeypatch.setattr(
        plans_module, "as_candidate", lambda problem, plan: SimpleNamespace(cost=1.0 - ("low" in plan.note) / 2)
    )
    monkeypatch.setattr(Workbench, "trial", lambda self, batches: None)
    bench: Any = SimpleNamespace(
        costs={}, quick=False, max_error=0.01, findings=(), checks=(), trial=list, usable=lambda batches: [1]
    )
    name, target = BASE.name, plans_module.MARGIN * bench.max_error
    given = {name: None}, {name: BASE}, {name: target}, {name: Baseline(0.5, True)}
    found = plans_module._tried(bench, *given, lambda detail: None)[name]  # type: ignore[arg-type]
    assert steps == (["paused", *verified] if dear else ["made"])
    assert found.verified and found.note == ("low" if dear and holds else "")
    steps.clear()
    both: Any = [dict.fromkeys((name, "autocast_bf16"), entry) for entry in (None, BASE, target, Baseline(0.5, True))]
    found = plans_module._tried(bench, *both, lambda detail: None)[name]
    assert steps == ["made", "made"] and found.note == ""  # the one may be made from the other as it is
