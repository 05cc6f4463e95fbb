"""Reasons add up: what is called affordable is lowered and the budget holds, what is called over the budget breaks it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import choice_from_scopes
from auditor.plan.plans import Planner
from auditor.plan.problem import Problem
from auditor.plan.reasons import merge_alike
from auditor.plan.workbench import Workbench
from auditor.records import Plan, Reason
from tests.support.capturing import Function
from tests.support.planning import bench_of, kept, lowered
from tests.support.replaying import Model
from tests.support.small_models import Deep
from tests.support.subjects import normal, seeded
from tests.support.unet import UNet

Planned = tuple[Workbench, dict[str, Plan]]
FORMATS = ("fp16", "bf16")
MOST = 8
"""Modules of a kind that are lowered, a plan."""

FEW = 3
"""Modules of one reason that are lowered."""


def overflowing() -> nn.Module:
    """A norm by hand whose squares leave FP16's range, between two layers."""
    return Model(
        lambda m, x: m.last(m.norm(m.first(x) * 500)),
        first=nn.Linear(16, 32),
        norm=Function(lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()),
        last=nn.Linear(32, 8),
    )


class Shared(nn.Module):
    """The head has the weight of a table; what it gives is scaled beyond FP16's range."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(20, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.table(ids)) * 8000).abs().log1p()


MODELS = {
    "unet": (UNet, (normal(1, 3, 16, 16), torch.tensor([17])), 0.008),
    "overflowing": (overflowing, (normal(4, 16),), 0.01),
    "shared": (Shared, (torch.arange(12).reshape(2, 6),), 0.003),
    "deep": (Deep, (normal(64, 256),), 0.0025),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "unet" else ()) for name in MODELS]
)
def planned(request: pytest.FixtureRequest) -> Planned:
    model, inputs, budget = MODELS[request.param]
    bench = bench_of(seeded(model), *inputs, formats=FORMATS, max_error=budget)
    planner = Planner(bench)
    return bench, planner.plans(planner.baselines())


def problems(bench: Workbench, plans: dict[str, Plan]) -> Iterator[tuple[Plan, Problem]]:
    for plan in plans.values():
        yield plan, bench.problem(plan.strategy, plan.format)


def by_kind(plan: Plan, *kinds: str) -> list[str]:
    return [path for reason in plan.reasons if reason.kind in kinds for path in reason.modules]


def test_every_module_and_operation_that_is_not_low_has_one_reason(planned: Planned) -> None:
    bench, plans = planned
    for plan, problem in problems(bench, plans):
        resolution = problem.resolve(choice_from_scopes(plan.scopes))
        named = [path for reason in plan.reasons for path in reason.modules]
        assert len(named) == len(set(named))
        operations = [name for reason in plan.reasons for name in reason.operations]
        assert len(operations) == len(set(operations))
        for name, node in bench.capture.nodes.items():
            low = resolution.low(name) or (not node.floating and resolution.touches_low(name))
            assert low == (name not in operations and node.owner not in named), (plan.name, name)
        assert all(reason.words for reason in plan.reasons)


def test_what_is_affordable_holds_the_budget_and_what_is_over_it_breaks_it(planned: Planned) -> None:
    bench, plans = planned
    for plan, problem in problems(bench, plans):
        if not plan.is_verified:
            continue
        for path in by_kind(plan, "no-gain", "margin")[:MOST]:
            found = lowered(bench, problem, plan, [path])
            assert found.is_verified, (plan.name, path, found.measured_error, found.verification)
        for path in by_kind(plan, "budget"):
            found = lowered(bench, problem, plan, [path])
            assert not found.is_verified, (plan.name, path, found.measured_error)


def test_what_they_add_is_what_a_run_adds(planned: Planned) -> None:
    bench, plans = planned
    for plan, problem in problems(bench, plans):
        for reason in plan.reasons if plan.is_verified else ():
            if not reason.ran or reason.adds is None:
                continue
            runs = [lowered(bench, problem, plan, [path]) for path in reason.modules[:FEW]]
            added = max(found.measured_error - plan.measured_error for found in runs)
            if len(reason.modules) <= FEW:
                assert added == pytest.approx(reason.adds, abs=2e-5)
            assert added <= reason.adds + 2e-5
            assert reason.left == pytest.approx(bench.max_error - plan.measured_error, abs=2e-5)


def test_what_must_stay_at_least_runs_and_holds(planned: Planned) -> None:
    bench, plans = planned
    for plan, problem in problems(bench, plans):
        assert set(plan.least) <= set(plan.kept_modules)
        if plan.is_verified:
            found = kept(bench, problem, plan, plan.least)
            assert found.is_verified, (plan.name, plan.least, found.measured_error, found.verification)


def test_those_alike_stand_together() -> None:
    one = Reason("no-gain", "running it in low precision saves no time", ("a",))
    two = Reason("no-gain", "running it in low precision saves no time", ("b",))
    other = Reason("no-gain", "running only this in low precision saves no time", ("c",))
    assert merge_alike([one, two, other]) == (
        Reason("no-gain", "running it in low precision saves no time", ("a", "b")),
        other,
    )


KINDS = {
    "UNet": {"margin", "no-gain", "not-floating", "strategy", "author", "inherited"},
    "Overflowing": {"unsafe", "inherited"},
    "Shared": {"unsafe", "tied"},
    "Deep": {"budget"},
}


def test_the_kinds_are_met(planned: Planned) -> None:
    bench, plans = planned
    found = {reason.kind for plan in plans.values() for reason in plan.reasons}
    assert KINDS.get(type(bench.subject.model).__name__, set()) <= found, found


def test_modules_that_gain_nothing_share_one_reason_with_the_largest_numbers() -> None:
    idle = [
        Reason("no-gain", "w", modules=(f"blocks.{i}",), adds=adds, left=0.01, saves=saves)
        for i, (adds, saves) in enumerate([(1e-6, 0.0), (3e-6, 1e-5), (-2e-6, 0.0)])
    ]
    ran = [replace(reason, ran=True) for reason in idle]
    for all_ran, reasons in ((True, ran), (False, [*ran[:2], idle[2]])):
        (one,) = merge_alike(reasons)
        assert (one.modules, one.adds, one.saves) == (("blocks.0", "blocks.1", "blocks.2"), 3e-6, 1e-5)
        assert one.ran == all_ran
    over = [replace(reason, kind="budget", words=f"to {reason.adds}") for reason in idle]
    assert merge_alike(over) == tuple(over)  # whose figures are in the words
