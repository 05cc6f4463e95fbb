"""All plans of an audit: everything low first, then what is searched, exchanged and improved."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.execution.policy import Policy, choice_from_scopes, choice_keeping
from auditor.plan import all_low
from auditor.plan import plans as module
from auditor.plan.all_low import run_all_low
from auditor.plan.context import PlanningContext
from auditor.plan.modules import merge_alike
from auditor.plan.plans import Planner
from auditor.plan.problem import Problem
from auditor.records import Plan, Reason
from auditor.records.paths import FP32_OUTPUT, function_in
from tests.support.capturing import Function
from tests.support.planning import Foretold, kept, lowered, planner_of, planning_of
from tests.support.replaying import Model
from tests.support.small_models import Deep
from tests.support.subjects import FORMATS, normal, seeded
from tests.support.unet import UNet


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))


def overflowing() -> nn.Module:
    """Squares of large numbers: too large for FP16, no trouble in BF16."""
    return Model(lambda m, x: m.lin(x / 1e3) + (x * 1e3).square().mean(-1, keepdim=True).sqrt(), lin=nn.Linear(16, 16))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """What was replayed."""
    found, error = list[Policy](), PlanningContext.replay

    def counted(self: PlanningContext, batches: Any, how: Policy) -> float:
        found.append(how)
        return error(self, batches, how)

    monkeypatch.setattr(PlanningContext, "replay", counted)
    return found


def test_where_everything_low_holds_it_is_the_plan_and_no_search_is_begun(replays: list[Policy]) -> None:
    audit = auditor.audit(mlp(), normal(4, 16))
    assert replays == []
    for name, plan in audit.plans.items():
        assert plan.is_verified
        assert [choice.precision for choice in plan.scopes.values()] == [plan.format]
        assert plan.verification.with_gradients is None  # FP32 answers the same with them
        assert audit.baselines[name].measured_error == plan.measured_error


class Residual(nn.Module):
    """A block whose result is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_replays_of_one_search_compute_only_what_differs(
    replays: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compute = list[str](), Policy.compute

    def noted(self: Policy, n: Any, value_of: Any) -> Any:
        if n.op != "output":
            computed.append(n.name)
        return compute(self, n, value_of)

    model = seeded(lambda: nn.Sequential(*[Residual(64) for _ in range(6)]))
    planning = planning_of(model, normal(16, 64), formats=("bf16",), max_error=0.0019)  # all low is just over it
    planner = planner_of(planning)
    monkeypatch.setattr(Policy, "compute", noted)
    planner.plans()
    assert len(replays) > 6
    assert len(computed) <= 0.9 * len(replays) * len(planning.capture.nodes)


def test_what_is_unsafe_is_no_plan_and_a_baseline_all_the_same() -> None:
    planning = planning_of(seeded(overflowing), normal(4, 16) * 100, strategies=("cast",))
    assert "unsafe" in {each["fp16"].verdict for each in planning.judged.verdicts.values()}
    baselines = run_all_low(planning).runs
    assert not baselines["cast_fp16"].finite
    plans = Planner(planning, baselines).plans()
    assert "fp32" in {choice.precision for choice in plans["cast_fp16"].scopes.values()}
    assert "fp32" not in {choice.precision for choice in plans["cast_bf16"].scopes.values()}


def test_an_artefact_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, verify = list[Plan](), module.verify

    def counted(planning: Any, plans: dict[str, Plan]) -> dict[str, Plan]:
        ran.extend(plans.values())
        return verify(planning, plans)

    monkeypatch.setattr(module, "verify", counted)
    monkeypatch.setattr(all_low, "verify", counted)
    for budget in (0.01, 0.0025):
        ran.clear()
        auditor.audit(seeded(Deep), normal(64, 256), formats="bf16", max_error=budget)
        made = [(plan.name, *sorted(path for path, c in plan.scopes.items() if c.precision == "fp32")) for plan in ran]
        assert len(made) == len(set(made))


def test_what_another_strategy_chose_is_taken_where_it_is_better_and_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = planning_of(seeded(Deep), normal(64, 256), formats=("bf16",), max_error=0.5)
    planner = planner_of(planning)
    spaces = {name: Foretold(space.problem, 0.5) for name, space in planner.spaces.items()}
    planner.spaces = dict(spaces)
    found = {id(spaces["autocast_bf16"]): spaces["autocast_bf16"].low}
    monkeypatch.setattr(module, "choose", lambda space, *rest: found.get(id(space), space.nothing))
    monkeypatch.setattr(module, "improve", lambda space, chosen, limit: chosen)
    limits = dict.fromkeys(spaces, 0.5)
    assert not planner.make(limits)["cast_bf16"].high
    spaces["cast_bf16"].off = math.inf
    spaces["cast_bf16"].log.clear()
    assert planner.make(limits)["cast_bf16"] == spaces["cast_bf16"].nothing


def test_a_recurrent_layer_under_bf16_autocast_is_predicted_in_fp16_in_which_it_runs() -> None:
    model = seeded(lambda: nn.GRU(8, 16, batch_first=True))
    audit = auditor.audit(model, normal(4, 12, 8), strategies=["autocast"], max_error=0.05)
    bf16, fp16 = audit.plans["autocast_bf16"], audit.plans["autocast_fp16"]
    assert bf16.measured_error == pytest.approx(fp16.measured_error, rel=0.1)
    assert bf16.predicted_error == pytest.approx(bf16.measured_error, rel=0.5)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_product_whose_bias_is_added_apart_rounds_twice(fmt: str) -> None:
    """torch adds the bias of a linear layer apart where the rows are not contiguous, as those of a GRU are, batch first."""

    model = seeded(lambda: Model(lambda m, x: m.mix(x.transpose(1, 2)), mix=nn.Linear(64, 64)))
    model.mix.bias.data *= 8
    audit = auditor.audit(model, normal(8, 64, 32), strategies=["cast"], formats=[fmt])
    (plan,) = audit.plans.values()
    assert plan.predicted_error == pytest.approx(plan.measured_error, rel=0.05)


def post_norm(m: Any, x: Tensor) -> Tensor:
    """Blocks that add little to a value: the sum reads the value in FP32, the product in low precision."""
    for product, norm in zip(m.products, m.norms, strict=True):
        x = norm(x + 0.02 * product(x).relu())
    return x


def pre_norm(m: Any, x: Tensor) -> Tensor:
    """Blocks that add little to a value: the model's own sum reads the value, and the block's norm."""
    for product, norm in zip(m.products, m.norms, strict=True):
        x = x + 0.02 * product(norm(x)).relu()
    return x


def layers(kind: Callable[[int], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(kind(32) for _ in range(3))


def square(width: int) -> nn.Linear:
    return nn.Linear(width, width)


@pytest.mark.parametrize(
    ("forward", "strategy", "kept"), [(post_norm, "autocast", ()), (post_norm, "cast", ()), (pre_norm, "cast", ("",))]
)
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_value_that_is_cast_for_some_of_its_readers_adds_error_only_through_these(
    forward: Callable[..., Tensor], strategy: str, kept: tuple[str, ...], fmt: str
) -> None:
    planning = planning_of(
        seeded(lambda: Model(forward, products=layers(square), norms=layers(nn.LayerNorm))), normal(256, 32)
    )
    problem = planning.problem(strategy, fmt)
    chosen, whole = problem.evaluate(kept), planning.problem("cast", fmt).evaluate(())
    ran = planning.replay(planning.checks, problem.policy_for(choice_keeping(chosen.high, fmt)))
    assert chosen.predicted_error == pytest.approx(ran, rel=0.2)
    assert chosen == whole or whole.predicted_error > 10 * ran


def test_runs_split_an_effect_by_readers_as_first_order_does() -> None:
    model = seeded(lambda: Model(post_norm, products=layers(square), norms=layers(nn.LayerNorm)))
    audit = auditor.audit(
        model, normal(256, 32), formats="bf16", criteria="output: max_abs <= 0.02"
    )  # without first order
    known = {report.node.name: report.contributions["bf16"] for report in audit.nodes}
    assert [known[name].decided_by for name in ("linear", "linear_1")] == ["re-run", "group"]
    assert 0 < known["linear"].reads["args_0"] < 0.1 and 0 < known["linear_1"].reads["layer_norm"] < 0.1


def test_pairs_of_scopes_and_sums_in_fp32_count_only_what_is_read_low() -> None:
    model = seeded(lambda: Model(post_norm, products=layers(square), norms=layers(nn.LayerNorm)))
    planning = planning_of(model, normal(256, 32), max_error=1e-3)
    assert planning.judged.verdicts["add"]["bf16"].verdict == "unsafe"  # with both of its inputs rounded
    assert planning.problem("autocast", "bf16").evaluate(()).feasible
    cast, _ = planning.problem("cast", "bf16").energy.pairs["norms.0", "products.1"]
    assert 0 < math.sqrt(cast) < 0.1 * planning.contributions["bf16"]["layer_norm"].cast


# Reasons add up: what is called affordable is lowered and the budget holds, what is called over the budget breaks it.


Planned = tuple[PlanningContext, dict[str, Plan]]
MOST = 8
"""Modules of a kind that are lowered, a plan."""

FEW = 3
"""Modules of one reason that are lowered."""


def squared() -> nn.Module:
    """A norm by hand whose squares leave FP16's range, between two layers."""
    return Model(
        lambda m, x: m.last(m.norm(m.first(x) * 500)),
        first=nn.Linear(16, 32),
        norm=Function(lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()),
        last=nn.Linear(32, 8),
    )


def shared(scale: float) -> nn.Module:
    """The head has the weight of a table; its inputs are scaled beyond FP16's range, or so far that its result is."""
    table, mix, head = nn.Embedding(20, 32), nn.Linear(32, 32), nn.Linear(32, 20, bias=False)
    head.weight = table.weight
    parts = {"table": table, "mix": mix, "head": head}
    return Model(lambda m, ids: m.head(m.mix(m.table(ids)) * scale).abs().log1p(), **parts)


MODELS = {
    "unet": (UNet, (normal(1, 3, 16, 16), torch.tensor([17])), 0.008),
    "squared": (squared, (normal(4, 16),), 0.01),
    "shared": (partial(shared, 200_000), (torch.arange(12).reshape(2, 6),), 0.003),
    "output": (partial(shared, 8000), (torch.arange(12).reshape(2, 6),), 0.003),
    "deep": (Deep, (normal(64, 256),), 0.0025),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "unet" else ()) for name in MODELS]
)
def planned_of(request: pytest.FixtureRequest) -> Planned:
    model, inputs, budget = MODELS[request.param]
    planning = planning_of(seeded(model), *inputs, formats=FORMATS, max_error=budget)
    return planning, planner_of(planning).plans()


def problems(planning: PlanningContext, plans: dict[str, Plan]) -> Iterator[tuple[Plan, Problem]]:
    for plan in plans.values():
        yield plan, planning.problem(plan.strategy, plan.format)


def by_kind(plan: Plan, *kinds: str) -> list[str]:
    return [path for reason in plan.reasons if reason.kind in kinds for path in reason.modules]


def test_every_module_and_operation_that_is_not_low_has_one_reason(planned_of: Planned) -> None:
    planning, plans = planned_of
    for plan, problem in problems(planning, plans):
        resolution = problem.resolve(choice_from_scopes(plan.scopes))
        named = [path for reason in plan.reasons for path in reason.modules]
        assert len(named) == len(set(named))
        operations = [name for reason in plan.reasons for name in reason.operations]
        assert len(operations) == len(set(operations))
        for name, node in planning.capture.nodes.items():
            low = resolution.low(name) or (not node.floating and resolution.touches_low(name))
            assert low == (name not in operations and node.owner not in named), (plan.name, name)
        assert all(reason.words for reason in plan.reasons)


def test_what_is_affordable_holds_the_budget_and_what_is_over_it_breaks_it(planned_of: Planned) -> None:
    planning, plans = planned_of
    for plan, problem in problems(planning, plans):
        if not plan.is_verified:
            continue
        for path in by_kind(plan, "no-gain", "margin")[:MOST]:
            found = lowered(planning, problem, plan, [path])
            assert found.is_verified, (plan.name, path, found.measured_error, found.verification)
        for path in by_kind(plan, "budget"):
            found = lowered(planning, problem, plan, [path])
            assert not found.is_verified, (plan.name, path, found.measured_error)


def test_what_they_add_is_what_a_run_adds(planned_of: Planned) -> None:
    planning, plans = planned_of
    for plan, problem in problems(planning, plans):
        for reason in plan.reasons if plan.is_verified else ():
            if not reason.ran or reason.adds is None:
                continue
            paths = (*reason.modules, *reason.functions)
            runs = [lowered(planning, problem, plan, [path]) for path in paths[:FEW]]
            added = max(found.measured_error - plan.measured_error for found in runs)
            if len(paths) <= FEW:
                assert added == pytest.approx(reason.adds, abs=2e-5)
            assert added <= reason.adds + 2e-5
            assert reason.left == pytest.approx(planning.max_error - plan.measured_error, abs=2e-5)


def test_what_must_stay_at_least_runs_and_holds(planned_of: Planned) -> None:
    planning, plans = planned_of
    for plan, problem in problems(planning, plans):
        assert set(plan.least) <= set(plan.kept_modules)
        if plan.is_verified:
            outputs = [function_in(path, name) for path, name in plan.exceptions if name.endswith(FP32_OUTPUT)]
            found = kept(planning, problem, plan, [*plan.least, *outputs])
            assert found.is_verified, (plan.name, plan.least, found.measured_error, found.verification)


OF_EACH = {
    "unet": {"margin", "no-gain", "not-floating", "strategy", "author", "inherited"},
    "squared": {"unsafe", "inherited"},
    "shared": {"unsafe", "tied"},
    "output": {"unsafe", "inherited"},
    "deep": {"budget"},
}


def test_the_kinds_are_met(planned_of: Planned, request: pytest.FixtureRequest) -> None:
    found = {reason.kind for plan in planned_of[1].values() for reason in plan.reasons}
    assert OF_EACH[request.node.callspec.params["planned_of"]] <= found, found


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


def test_low_precision_that_only_single_modules_allow_and_that_saves_nothing_is_said_so() -> None:
    def spectrum(m: Any, x: Tensor) -> Tensor:  # raises with both in BF16, which has no complex numbers
        return m.head(torch.stft(m.pre(x)[:, 0], 128, window=m.window, return_complex=True).abs().mT)

    parts = {"pre": nn.Conv1d(1, 1, 9, padding=4), "head": nn.Linear(65, 8), "window": torch.hann_window(128)}
    audit = auditor.audit(Model(spectrum, **parts), torch.randn(2, 1, 2000), formats="bf16", strategies="cast")
    assert "with the operations that raise in FP32, low precision saves no time" in audit.recommendation


def test_a_transform_to_complex_numbers_that_bf16_refuses_is_in_no_choice_of_low_precision() -> None:
    model = Model(lambda m, x: torch.fft.rfft(m.pre(x)).abs(), pre=nn.Linear(16, 16))
    problem = planning_of(model, normal(4, 16), formats=("bf16",)).problem("cast", "bf16")
    assert not problem.evaluate(()).feasible
    assert problem.cheapest(0.01).feasible
