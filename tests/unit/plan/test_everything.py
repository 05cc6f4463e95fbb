"""Everything low comes first: where it is safe, fast and holds it is the plan, and nothing is searched for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.plan import plans as module
from auditor.plan.choose import MARGIN
from auditor.plan.everything import everything_low
from auditor.plan.plans import plans_of
from auditor.records import Plan
from tests.planning import bench_of
from tests.subjects import normal, seeded


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))


class Overflowing(nn.Module):
    """Squares of large numbers: too large for FP16, no trouble in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x / 1e3) + (x * 1e3).square().mean(-1, keepdim=True).sqrt()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the plans that were searched for."""
    found: list[str] = []
    make = module.make_plan

    def counted(problem: Any, *rest: Any) -> Plan:
        found.append(problem.name)
        return make(problem, *rest)

    monkeypatch.setattr(module, "make_plan", counted)
    return found


def test_where_everything_low_holds_it_is_the_plan_and_no_search_is_begun(searches: list[str]) -> None:
    audit = auditor.audit(mlp(), normal(4, 16))
    assert searches == []
    for name, plan in audit.plans.items():
        assert plan.verified
        assert [choice.precision for choice in plan.scopes.values()] == [plan.format]
        assert plan.verification is not None
        assert plan.verification.with_gradients is not None
        assert audit.baselines[name].measured_error == plan.measured_error


def test_what_holds_is_what_the_model_gives_under_plain_autocast() -> None:
    model, x = mlp(), normal(4, 16)
    audit = auditor.audit(model, x)
    with torch.no_grad(), auditor.imitated("cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
        low = model(x).float()
    reference = model(x).detach()
    expected = float((low - reference).norm() / reference.norm())
    assert audit.baselines["autocast_bf16"].measured_error == pytest.approx(expected, rel=1e-6)
    assert audit.baselines["autocast_bf16"].rules_only.measured_error == pytest.approx(expected, rel=1e-6)


def test_a_budget_that_everything_low_breaks_is_searched_for(searches: list[str]) -> None:
    model, x = mlp(), normal(4, 16)
    plain = auditor.audit(model, x, strategies="cast", formats="bf16").baselines["cast_bf16"].measured_error
    assert plain is not None
    searches.clear()
    audit = auditor.audit(model, x, strategies="cast", formats="bf16", max_error=plain * 0.9)
    assert "cast_bf16" in searches
    assert audit.baselines["cast_bf16"].measured_error == plain
    plan = audit.plans["cast_bf16"]
    assert not plan.verified or plan.measured_error <= plain * 0.9


def test_what_is_unsafe_is_not_tried() -> None:
    bench = bench_of(seeded(Overflowing), normal(4, 16) * 100)
    assert "unsafe" in {verdict.verdict for verdict in bench.verdicts["fp16"].values()}
    tried = everything_low(bench, ("cast",), ("fp16", "bf16"), lambda _: None)
    assert set(tried) == {"cast_bf16"}


def test_what_was_tried_and_does_not_hold_is_no_plan(searches: list[str]) -> None:
    bench = bench_of(mlp(), normal(4, 16))
    problem = bench.problem("cast", "bf16")
    broken = {"cast_bf16": Plan("cast_bf16", "cast", "bf16", {}, 0.0, 1.0, 1.0, measured_error=1.0, verified=False)}
    baselines = module.as_run({}, {}) | {"cast_bf16": auditor.records.Baseline(1.0, True)}
    (plan,) = plans_of(bench, ("cast",), ("bf16",), baselines, lambda _: None, broken).values()
    assert searches == [problem.name]
    assert plan is not broken["cast_bf16"]
    assert plan.verified


def test_quick_is_one_format_one_strategy_and_no_search(searches: list[str]) -> None:
    audit = auditor.audit(mlp(), normal(4, 16), quick=True)
    assert (audit.formats, set(audit.plans)) == (("fp16",), {"autocast_fp16"})
    assert audit.plans["autocast_fp16"].verified
    audit = auditor.audit(mlp(), normal(4, 16), quick=True, formats=("bf16", "fp16"), strategies=("cast", "autocast"))
    assert set(audit.plans) == {"cast_bf16"}
    assert searches == []


def test_quick_without_a_search_still_finds_what_is_predicted_to_hold_and_runs_it(searches: list[str]) -> None:
    model, x = mlp(), normal(4, 16)
    plain = auditor.audit(model, x, quick=True, formats="bf16").baselines["autocast_bf16"].measured_error
    assert plain is not None
    audit = auditor.audit(model, x, quick=True, formats="bf16", max_error=0.9 * plain)
    assert searches == []
    plan = audit.plans["autocast_bf16"]
    assert plan.verified
    assert plan.measured_error <= 0.9 * plain
    assert plan.predicted_error <= MARGIN * 0.9 * plain
