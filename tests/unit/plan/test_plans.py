"""Plans judged, tightened and exchanged: hand-made numbers in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.formats.metrics import output_error
from auditor.plan import plans as plans_module
from auditor.plan.choose import fp32_plan, plain_plan
from auditor.plan.plans import _allowed, _outdone, _tightened, as_run, judged, plans_of
from auditor.plan.workbench import Workbench
from auditor.records import Baseline, Noise, Plan, RulesOnly, ScopeChoice, Subject, Verification
from auditor.verify import Answers
from tests import planning
from tests.subjects import normal, seeded

ROOT = {"": ScopeChoice("fp16")}
BASE = Plan("autocast_fp16", "autocast", "fp16", ROOT, 0.001, 0.9, 2.0, measured_error=0.002, verified=True)


def plans(*several: Plan) -> dict[str, Plan]:
    return {plan.name: plan for plan in several}


def named(name: str, **changes: Any) -> Plan:
    strategy, fmt = name.split("_")
    return replace(BASE, name=name, strategy=strategy, format=fmt, **changes)


def bench_of(distance: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]) -> Workbench:
    subject = Subject(nn.Module(), (((), {}),), "toy", "toy.py", "toy", "toy")
    return Workbench(
        subject=subject,
        capture=None,  # type: ignore[arg-type]
        costs={},
        contributions={},
        verdicts={},
        findings=(),
        distance=distance,
        budget=0.01,
        seed=0,
        gpu="A100",
        device="cpu",
        floor=Noise(error=2.0**-30, floor=3 * 2.0**-30),
    )


@pytest.mark.parametrize(
    ("errors", "verified"),
    [
        ([0.001, 0.002], True),
        ([0.01], True),
        ([0.001, 0.011], False),
        ([math.inf], False),
        ([math.nan], False),
        ([math.nan, 0.001], False),
        ([0.001, math.nan], False),
    ],
)
def test_the_worst_batch_decides_and_nan_fails(errors: list[float], verified: bool) -> None:
    remaining = iter(errors)
    bench = bench_of(lambda reference, candidate: next(remaining))
    outputs = Answers([[torch.ones(1)] for _ in errors])
    plan = judged(bench, replace(BASE, measured_error=None, verified=False), outputs, outputs)
    assert plan.verified is verified
    if verified:
        assert plan.measured_error == max(errors)
    assert plan.verification is not None
    assert plan.verification.finite is all(map(math.isfinite, errors))


def test_a_run_that_raised_is_a_failure_with_its_reason() -> None:
    plan = judged(bench_of(lambda r, c: 0.0), BASE, Answers([[torch.ones(1)]]), "RuntimeError: no such kernel")
    assert (plan.verified, plan.measured_error) == (False, None)
    assert plan.verification is not None
    assert plan.verification.failure == "RuntimeError: no such kernel"


def judged_with_gradients(without: float, enabled: float) -> Plan:
    """A plan whose outputs are that far from FP32 without and with gradients."""
    expected = Answers([[torch.ones(1)]], [torch.ones(1)])
    answer = Answers([[torch.ones(1) + without]], [torch.ones(1) + enabled])
    return judged(bench_of(output_error), BASE, expected, answer)


def test_the_run_with_gradients_has_an_error_of_its_own_and_must_hold_too() -> None:
    plan = judged_with_gradients(0.004, 0.006)
    assert plan.verified and plan.verification is not None
    assert plan.measured_error == pytest.approx(0.004, rel=1e-3)
    assert plan.verification.with_gradients == pytest.approx(0.006, rel=1e-3)
    assert plan.verification.noise == 2.0**-30
    over = judged_with_gradients(0.009, 0.011)
    assert not over.verified
    assert over.measured_error == pytest.approx(0.009, rel=1e-3)


def test_a_plan_that_answers_otherwise_with_gradients_has_failed() -> None:
    # FP16 has a unit of 2**-10 = 0.00098: rounding explains up to 2 * 0.001 + 0.00098
    plan = judged_with_gradients(0.001, 0.0031)
    assert (plan.verified, plan.measured_error) == (False, None)
    assert plan.verification is not None
    assert "with gradients enabled" in str(plan.verification.failure)
    assert judged_with_gradients(0.001, 0.0029).verified
    assert judged_with_gradients(math.nan, 0.5).measured_error is None


def test_outputs_of_another_shape_are_a_failure_of_the_plan() -> None:
    plan = judged(bench_of(output_error), BASE, Answers([[torch.ones(5)]]), Answers([[torch.ones(3)]]))
    assert not plan.verified
    assert plan.verification is not None
    assert "shape" in str(plan.verification.failure)


def test_a_missed_budget_is_tightened_by_what_it_was_over_and_by_half_at_least() -> None:
    assert _tightened(0.008, replace(BASE, measured_error=0.04), 0.01) == pytest.approx(0.008 * 0.8 * 0.01 / 0.04)
    assert _tightened(0.008, replace(BASE, measured_error=0.0101), 0.01) == pytest.approx(0.004)
    assert _tightened(0.008, replace(BASE, measured_error=None), 0.01) == pytest.approx(0.002)


ISLAND = {**ROOT, "norm": ScopeChoice("fp32")}


def test_a_plan_is_outdone_by_a_model_without_one_that_is_closer() -> None:
    plan = replace(BASE, scopes=ISLAND, measured_error=0.002)
    assert _outdone(plan, Baseline(0.001, True))
    assert not _outdone(plan, Baseline(0.002, True))
    assert not _outdone(plan, Baseline(None, False))
    noisy = replace(plan, verification=Verification(0.002, True, None, "held-out", "native", noise=0.0004))
    assert not _outdone(noisy, Baseline(0.001, True))  # no further apart than runs in FP32 are
    assert _outdone(noisy, Baseline(0.0007, True))
    assert not _outdone(replace(plan, scopes=ROOT), Baseline(0.001, True))  # everything low: that is no plan
    assert _allowed(plan, Baseline(0.001, True), 0.01) == 0.001
    assert _allowed(plan, Baseline(0.5, True), 0.01) == 0.01


class AsItIs:
    """Stands in for the reasons of a plan: nothing is found that could be low."""

    def __init__(self, problem: Any, plan: Plan, *rest: Any) -> None:
        self.whole = plan

    def affordable(self, target: float) -> tuple[str, ...]:
        return ()


class Solver:
    """Stands in for the solver and the runs: plans with one island, further off than the model without a plan."""

    def __init__(self, patch: pytest.MonkeyPatch, errors: dict[str, float], unsafe: bool) -> None:
        self.budgets: list[float] = []
        patch.setattr(plans_module, "make_plan", self.make)
        patch.setattr(plans_module, "plain_plan", lambda problem: replace(BASE, scopes=ROOT))
        patch.setattr(plans_module, "fp32_plan", lambda problem: replace(BASE, scopes={"": ScopeChoice("fp32")}))
        patch.setattr(plans_module, "lowers_unsafe", lambda problem, plan: unsafe)
        patch.setattr(plans_module, "_instead", lambda *_: {})
        patch.setattr(plans_module, "Explained", AsItIs)
        patch.setattr(
            plans_module, "verify", lambda bench, plans, tick: {n: self.run(p, errors) for n, p in plans.items()}
        )

    def make(self, problem: Any, trial: Any, budget: float, all_low: float | None = None) -> Plan:
        self.budgets.append(budget)
        return replace(BASE, scopes=ISLAND)

    def run(self, plan: Plan, errors: dict[str, float]) -> Plan:
        kind = "fp32" if plan.scopes[""].precision == "fp32" else "island" if len(plan.scopes) > 1 else "plain"
        return replace(plan, measured_error=errors[kind], verified=errors[kind] <= 0.01)


def test_a_plan_is_improved_as_often_as_reasons_are_looked_for_and_explained_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each plan that a round finds is verified, with the memory free that runs began from, and looked at in the next round."""
    steps: list[str] = []

    class Improvable(AsItIs):
        def affordable(self, target: float) -> tuple[str, ...]:
            steps.append(f"asked {self.whole.predicted_speedup:g}")
            return ("a",)

        def pause(self) -> None:
            steps.append("paused")

    def run(bench: Workbench, plans: dict[str, Plan], tick: Any) -> dict[str, Plan]:
        steps.append("verified")
        return {name: replace(plan, measured_error=0.001, verified=True) for name, plan in plans.items()}

    monkeypatch.setattr(plans_module, "Explained", Improvable)
    monkeypatch.setattr(plans_module, "verify", run)
    monkeypatch.setattr(
        plans_module,
        "with_low",
        lambda problem, plan, paths: replace(plan, predicted_speedup=plan.predicted_speedup + 1),
    )
    monkeypatch.setattr(
        plans_module, "as_candidate", lambda problem, plan: SimpleNamespace(cost=1 / plan.predicted_speedup)
    )
    monkeypatch.setattr(Workbench, "trial", lambda self, batches: None)
    monkeypatch.setattr(Workbench, "usable", lambda self, batches: [])
    plan = replace(BASE, scopes=ISLAND, measured_error=0.001, verified=True, predicted_speedup=1.0)
    bench, baseline = bench_of(lambda r, c: 0.0), Baseline(0.5, True)
    found = plans_module._with_reasons(bench, None, plan, 0.008, baseline, lambda detail: None)  # type: ignore[arg-type]
    rounds = plans_module.IMPROVED - 1
    assert steps == [step for n in range(1, 1 + rounds) for step in (f"asked {n}", "paused", "verified")]
    assert found.predicted_speedup == 1 + rounds


@pytest.mark.parametrize(
    ("errors", "unsafe", "kept"),
    [
        ({"plain": 0.001, "island": 0.002, "fp32": 0.0}, False, "plain"),
        ({"plain": 0.001, "island": 0.002, "fp32": 0.0}, True, "fp32"),  # it holds on these inputs, and is unsafe
        ({"plain": 0.5, "island": 0.6, "fp32": 0.0}, False, "fp32"),
        ({"plain": 0.5, "island": 0.4, "fp32": 0.0}, False, "island"),  # out of reach, and said so
        ({"plain": 0.5, "island": 0.002, "fp32": 0.0}, False, "island"),
    ],
)
def test_no_plan_is_further_off_than_the_model_without_one(
    errors: dict[str, float], unsafe: bool, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = Solver(monkeypatch, errors, unsafe)
    monkeypatch.setattr(Workbench, "trial", lambda self, batches: None)
    monkeypatch.setattr(Workbench, "usable", lambda self, batches: [])
    monkeypatch.setattr(Workbench, "problem", lambda self, strategy, fmt: None)
    bench, baselines = bench_of(lambda r, c: 0.0), {"autocast_fp16": Baseline(errors["plain"], True)}
    (plan,) = plans_of(bench, ["autocast"], ["fp16"], baselines, lambda _: None).values()
    assert plan.measured_error == errors[kept]
    assert solver.budgets == sorted(solver.budgets, reverse=True)


def test_a_plan_that_lowers_everything_is_the_model_without_a_plan() -> None:
    rules = RulesOnly(0.0, True, None, 0.5)
    before = {"autocast_fp16": Baseline(0.0021, True, rules_only=rules), "cast_fp16": Baseline(0.3, True)}
    found = as_run(before, plans(BASE, named("cast_fp16", scopes=ISLAND)))
    assert found["autocast_fp16"] == Baseline(0.002, True, rules_only=rules)
    assert found["cast_fp16"] == before["cast_fp16"]


@pytest.mark.parametrize(("measured", "tried"), [(0.5, False), (None, True)])
def test_what_another_strategy_lowers_is_not_tried_where_the_model_itself_showed_it(
    measured: float | None, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival lowers everything: under this strategy that is the model without a plan, which was run."""
    ran: list[dict[str, str]] = []
    monkeypatch.setattr(
        plans_module, "simulated_error", lambda problem, point, *rest: ran.append(dict(point.precision)) or 0.0
    )
    bench = planning.bench_of(seeded(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))), normal(4, 16))
    problem = bench.problem("cast", "bf16")
    low, high = plain_plan(bench.problem("autocast", "bf16")), fp32_plan(problem)
    known = {
        "autocast_bf16": replace(low, measured_error=0.001, verified=True, predicted_speedup=2.0),
        "cast_bf16": high,
    }
    found = plans_module._as_another(bench, problem, Baseline(measured, measured is not None), known)
    assert (found is not None, bool(ran)) == (tried, tried)
    assert not ran or set(ran[0].values()) == {"bf16"}
