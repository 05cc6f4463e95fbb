"""All plans of an audit: everything low first, then what is searched, exchanged and improved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.plan import plans as module
from auditor.plan.choices import as_plan, everything
from auditor.plan.plans import everything_low, plans_of
from auditor.plan.search import MARGIN
from auditor.records import Plan
from tests.planning import Foretold, bench_of
from tests.small_models import Deep
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
    """Names of the plans that were searched for by runs."""
    found: list[str] = []
    choose = module.choose

    def counted(space: Any, limit: float, *runs: int) -> Any:
        if not runs:
            found.append(space.problem.name)
        return choose(space, limit, *runs)

    monkeypatch.setattr(module, "choose", counted)
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
    baselines = {"cast_bf16": auditor.records.Baseline(1.0, True)}
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


def test_no_plan_is_further_off_than_the_model_without_one() -> None:
    audit = auditor.audit(seeded(Deep), normal(64, 256), max_error=0.0025)
    for name, plan in audit.plans.items():
        plain = audit.baselines[name].measured_error
        assert plain is not None and plan.measured_error is not None
        mixed = any(choice.precision == "fp32" for choice in plan.scopes.values())
        assert plan.measured_error <= plain or not mixed


def test_an_artefact_that_is_further_off_than_the_model_without_a_plan_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is kept in FP32 does harm here: what is left is everything low where that holds, else FP32."""
    verify = module.verify

    def harmful(bench: Any, plans: dict[str, Plan], tick: Any) -> dict[str, Plan]:
        found = verify(bench, plans, tick)
        mixed = {n for n, p in found.items() if len({c.precision for c in p.scopes.values()}) > 1}
        return {n: replace(p, measured_error=0.9, verified=False) if n in mixed else p for n, p in found.items()}

    monkeypatch.setattr(module, "verify", harmful)
    for budget, precision in ((0.0025, "fp32"), (0.9, "bf16")):
        audit = auditor.audit(seeded(Deep), normal(64, 256), max_error=budget, formats="bf16", strategies="cast")
        (plan,) = audit.plans.values()
        assert {choice.precision for choice in plan.scopes.values()} == {precision}


def test_a_plan_that_holds_and_is_further_off_than_the_model_without_one_gives_way_to_fp32() -> None:
    bench = bench_of(seeded(Deep), normal(64, 256), formats=("bf16",), max_error=0.0025)
    baselines = {
        "cast_bf16": auditor.records.Baseline(1e-9, True)
    }  # of another model: everything low does not hold here
    (plan,) = plans_of(bench, ("cast",), ("bf16",), baselines, lambda _: None).values()
    assert {choice.precision for choice in plan.scopes.values()} == {"fp32"}
    baselines = {"cast_bf16": auditor.records.Baseline(0.5, True)}
    (plan,) = plans_of(bench, ("cast",), ("bf16",), baselines, lambda _: None).values()
    assert plan.verified
    assert {choice.precision for choice in plan.scopes.values()} == {"bf16", "fp32"}


def test_what_a_plan_of_another_strategy_keeps_is_taken_over_where_it_is_better_and_holds() -> None:
    bench = bench_of(seeded(Deep), normal(64, 256), formats=("bf16",), max_error=0.5)
    spaces = {name: Foretold(bench.problem(name, "bf16"), 0.5) for name in ("autocast", "cast")}
    low = as_plan(spaces["autocast"].problem, everything(spaces["autocast"].problem, "bf16"))
    known = {
        "autocast": replace(low, measured_error=0.001, verified=True, predicted_speedup=2.0),
        "cast": as_plan(spaces["cast"].problem, spaces["cast"].nothing),
    }
    ((name, point),) = module._shared(spaces, known)
    assert (name, set(point.precision.values())) == ("cast", {"bf16"})
    spaces["cast"].off = math.inf
    spaces["cast"].log.clear()
    assert list(module._shared(spaces, known)) == []
