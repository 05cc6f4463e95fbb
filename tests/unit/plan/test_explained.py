"""A plan with its reasons: rules first, then the clause, in the scopes of the plan."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.execution.policy import Policy, choice_keeping, plain
from auditor.plan import modules
from auditor.plan.costs import Cost
from auditor.plan.modules import as_candidate, explain_budget, explain_gain, improve, operation_reasons, with_reasons
from auditor.plan.plans import as_plan
from auditor.plan.problem import Problem
from auditor.plan.search import MARGIN, MAX_VERIFICATIONS, ROUNDS, Candidate, Space, choose, find_verified
from auditor.plan.verified import judge_replay, locate_nonfinite
from auditor.records import Plan, Reason, ScopeChoice, Verdict, Verification
from auditor.records.paths import function_in
from tests.support.capturing import Function, captured
from tests.support.findings import finding
from tests.support.planning import Foretold
from tests.support.problems import drawn, must_stay_fp32, problem_of
from tests.support.replaying import Model
from tests.support.subjects import capture_of, normal


@pytest.fixture
def found() -> tuple[Plan, Problem, str]:
    """A chain of five layers; the one in the middle is unsafe, the one behind it stays FP32 too."""
    drawn_ = drawn("chain", "autocast", random.Random(0), unsafe=0.0)
    bad = next(name for name, node in drawn_.capture.nodes.items() if node.owner == "2")
    problem = replace(drawn_, verdicts={**drawn_.verdicts, bad: Verdict("unsafe", "it overflows")})
    plan = as_plan(problem, problem.evaluate(("2", "3")))
    rules = (finding("SFT001", bad), finding("ATT001", bad), finding("BND003", bad, formats=("bf16",)))
    return with_reasons(Foretold(problem, 0.5), plan, rules), problem, bad


def test_every_fp32_scope_says_why_and_what_lowering_it_would_save(found: tuple[Plan, Problem, str]) -> None:
    plan, problem, bad = found
    (unsafe,), (other,) = plan.reasons_of("2"), plan.reasons_of("3")
    assert (unsafe.kind, unsafe.words) == ("unsafe", f"{bad} is unsafe, since it overflows")
    assert (unsafe.rules, other.rules) == (("ATT001", "SFT001"), ())  # BND003 is about BF16
    assert plan.reasons_of("") == ()
    both, one = problem.evaluate(("2", "3")), problem.evaluate(("3",))
    assert unsafe.saves == pytest.approx(max(1 - one.cost / both.cost, 0.0))  # of what is forbidden too
    assert plan.kept_modules == ("2", "3")


def costing(problem: Problem, cost: Cost) -> Problem:
    return replace(problem, costs=dict.fromkeys(problem.costs, cost))


@pytest.mark.parametrize("holds", [True, False])
def test_all_low_is_what_its_own_run_says(holds: bool) -> None:
    """The graph may hold on its batches where the model does not on those that plans are verified on."""
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(0, 0, True))
    low = problem.evaluate(())
    space = Foretold(problem, 0.5, off=1e-3, known=[] if holds else [(low, 0.6)])
    found = with_reasons(space, as_plan(problem, space.nothing), ())
    idle = [reason for reason in found.reasons if reason.kind == "no-gain"]
    assert idle
    assert (found.least == ()) == holds
    assert all(("low precision only there" in reason.words) != holds for reason in idle)


def test_a_reason_of_no_gain_names_no_rules() -> None:
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(0, 0, True))
    problem = replace(problem, verdicts=dict.fromkeys(problem.verdicts, Verdict("sensitive", "")))
    rules = [finding("BND004", name) for name in problem.capture.nodes]
    space = Foretold(problem, 0.5)
    idle = [r for r in with_reasons(space, as_plan(problem, space.nothing), rules).reasons if r.kind == "no-gain"]
    assert idle and not any(reason.rules for reason in idle)


def test_what_saves_less_than_one_more_change_of_precision_must_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.plan.problem.ISLAND_SHARE", 1.0)
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(10**12, 1000, False))
    space = Foretold(problem, 1.0)
    (reason,) = [reason for reason in with_reasons(space, as_plan(problem, space.nothing), ()).reasons if reason.saves]
    share = f"{reason.saves:.1%} of the time"  # alike, so that what saves most is each of them
    assert reason.words == f"low precision there saves at most {share}, too little for one more change of precision"


def test_a_plan_is_what_it_was_made_from() -> None:
    problem = drawn("branches", "cast", random.Random(1), unsafe=0.0)
    chosen = problem.evaluate(("a",))
    assert as_candidate(problem, as_plan(problem, chosen)) == chosen


def half_low() -> tuple[Problem, Candidate]:
    """A chain every other layer of which is low; whatever is lowered gains."""
    problem = costing(drawn("chain", "autocast", random.Random(0), unsafe=0.0), Cost(10**12, 1000, False))
    return problem, problem.evaluate(("1", "3"))


def test_a_choice_is_improved_by_what_a_run_allows_and_by_no_more() -> None:
    problem, half = half_low()
    alone = {owner: problem.evaluate(half.high - {owner}).predicted_error for owner in "13"}
    both = problem.evaluate(()).predicted_error
    least, most = sorted(alone, key=alone.__getitem__)
    assert half.predicted_error < alone[least] < alone[most] < both
    for target, left in ((both, set()), ((alone[least] + alone[most]) / 2, {most}), (half.predicted_error, {"1", "3"})):
        space = Foretold(problem, 1.0001 * target / MARGIN)
        assert improve(space, half, MARGIN * space.budget).high == left


def test_what_runs_say_is_what_the_reasons_say() -> None:
    problem, half = half_low()
    space = Foretold(problem, 1.0, off=2.0)
    one = problem.evaluate(("3",))
    space.error(half), space.error(one)
    by_module = {path: one for one in with_reasons(space, as_plan(problem, half), ()).reasons for path in one.modules}
    assert (by_module["1"].ran, by_module["3"].ran) == (True, False)
    assert by_module["1"].adds == pytest.approx(2 * (one.predicted_error - half.predicted_error))


# A replay that is not finite has its first operation, from a run of the graph on the batch that shows it.

FINE, LARGE = (torch.ones(4),), (torch.full((4,), 300.0),)


@pytest.fixture(scope="module")
def planning() -> Any:
    model = Function(lambda x: (x * x).relu())
    capture = captured(model, *FINE).capture
    batches = [(FINE, {}), (LARGE, {})]
    subject = SimpleNamespace(model=model, batches=batches)
    return SimpleNamespace(capture=capture, subject=subject, checks=batches, replay_batches=batches, max_error=0.2)


def all_low(planning, fmt, precision=""):
    return Policy(planning.capture, "cast", plain(precision or fmt), fmt)


def test_the_batch_that_shows_it_is_looked_for(planning):
    first = locate_nonfinite(planning, all_low(planning, "fp16"))
    assert (first.op, first.value, first.cause) == ("aten.mul.Tensor", "Inf", "overflow")
    assert first.batch == 2


def test_a_replay_that_is_finite_has_none(planning):
    assert judge_replay(planning, 0.1, all_low(planning, "fp16")) == Verification(0.1, True)
    ran = judge_replay(planning, math.nan, all_low(planning, "fp16"))
    assert (ran.measured_error, ran.finite, ran.nonfinite) == (
        None,
        False,
        locate_nonfinite(planning, all_low(planning, "fp16")),
    )


@pytest.mark.parametrize(("fmt", "precision"), [("bf16", ""), ("fp16", "fp32")])
def test_a_run_that_the_graph_does_not_show_has_none(planning, fmt, precision):
    assert locate_nonfinite(planning, all_low(planning, fmt, precision)) is None


# The one search: predictions propose, replays dispose.


def made(price: float, predicted_error: float) -> Candidate:
    return Candidate(frozenset({price, predicted_error}), predicted_error, price)


class Line(Space):
    """Choices on a line, the cheapest with the largest error; `off`: what replays say of predictions, in order of the choices."""

    nothing = made(1e9, 0.0)

    def __init__(self, points: Sequence[Candidate], off: Sequence[float], known: Sequence[Candidate] = ()) -> None:
        super().__init__()
        self.points, self.off, self.known, self.asked = points, off, known, list[Candidate]()

    def propose(self, allowed: float) -> Candidate:
        return next((point for point in self.points if point.predicted_error <= allowed), self.nothing)

    def replay(self, point: Candidate) -> float:
        self.asked.append(point)
        return point.predicted_error * self.off[self.points.index(point)]

    def within_budget(self) -> list[Candidate]:
        return [point for point in self.known if self.log.get(point.high) != math.inf]


def line(size: int = 100, off: float = 1.0) -> Line:
    return Line([made(100 + i, 1 - i / size) for i in range(size)], [off] * size)


@pytest.mark.parametrize("off", [0.3, 0.6, 1.0, 1.3, 2.5])
def test_what_one_run_says_of_predictions_decides_on_the_next(off: float) -> None:
    space = line(off=off)
    found = choose(space, 0.4)
    best = next(point for point in space.points if off * point.predicted_error <= 0.4)
    assert off * found.predicted_error <= 0.4
    assert found.price <= 1.02 * best.price
    assert len(space.asked) <= 6


@settings(max_examples=200, deadline=None, derandomize=True)
@given(off=st.lists(st.sampled_from([0.2, 0.9, 1.1, 3.0, math.inf, math.nan]), min_size=30, max_size=30))
def test_what_is_chosen_holds_whatever_runs_say(off: list[float]) -> None:
    space = Line(line(30).points, off)
    found = choose(space, 0.5)
    assert found == space.nothing or space.error(found) <= 0.5
    assert len(space.asked) <= MAX_VERIFICATIONS + 1


def test_nothing_is_run_where_a_choice_is_known_to_hold_and_no_other_is_cheaper() -> None:
    space = Line(line().points, [1.0] * 100, known=[made(100, 0.9)])
    assert choose(space, 0.5) == space.known[0]
    assert space.asked == []
    space.log[space.known[0].high] = math.inf
    assert choose(space, 0.5).predicted_error == 0.5


def test_what_is_known_to_hold_and_dearer_than_fp32_is_not_chosen() -> None:
    space = Line([], [], known=[made(2e9, 0.1)])
    assert choose(space, 0.5) == space.nothing


PLAN = Plan("cast_fp16", "cast", "fp16", {"": ScopeChoice("fp16")}, 0.0, 1.0, 1.0)


def test_what_its_artefact_does_not_bear_out_is_made_for_less_error() -> None:
    space, limits = line(), list[float]()

    def make(wanted: Mapping[str, float]) -> dict[str, Candidate]:
        limits.extend(wanted.values())
        return {name: choose(space, limit) for name, limit in wanted.items()}

    def verify(made: Mapping[str, Candidate]) -> dict[str, Plan]:
        errors = {name: 3 * point.predicted_error for name, point in made.items()}
        return {name: replace(PLAN, verification=Verification(error, error <= 0.5)) for name, error in errors.items()}

    plans = find_verified({"a": space}, 0.5, make, verify)
    assert plans["a"].is_verified
    assert limits[0] == MARGIN * 0.5
    assert limits == sorted(limits, reverse=True)
    assert list(space.log.values()).count(math.inf) == len(limits) - 1
    limits.clear()
    never = find_verified({"a": line()}, 0.5, make, lambda made: {"a": replace(PLAN, verification=Verification(0.6))})
    assert len(limits) == ROUNDS
    assert set(never) == {"a"}
    limits.clear()
    find_verified({"a": line()}, 0.5, make, lambda made: {"a": PLAN})  # it fails
    assert limits[:2] == [MARGIN * 0.5, MARGIN * 0.5 / 4]
    for ran, smaller in ((Verification(0.0, scattered=2.0), MARGIN * 0.5 / 2.0), (Verification(0.0), 0.25)):
        limits.clear()
        find_verified({"a": line()}, 0.5, make, lambda made, ran=ran: {"a": replace(PLAN, verification=ran)})
        assert limits[:2] == [MARGIN * 0.5, MARGIN * 0.5 * smaller]


def test_a_near_miss_costs_little_of_the_budget() -> None:
    """Held-out inputs with errors 1.3 times those of the calibration inputs: 0.5 / 1.3 is the most that holds."""
    space = line()

    def make(wanted: Mapping[str, float]) -> dict[str, Candidate]:
        return {name: choose(space, limit) for name, limit in wanted.items()}

    def verify(made: Mapping[str, Candidate]) -> dict[str, Plan]:
        errors = {name: 1.3 * point.predicted_error for name, point in made.items()}
        return {name: replace(PLAN, verification=Verification(error, error <= 0.5)) for name, error in errors.items()}

    plans = find_verified({"a": space}, 0.5, make, verify)
    assert plans["a"].is_verified
    assert plans["a"].measured_error >= 0.7 * 0.5


def test_the_search_goes_on_just_below_a_choice_whose_artefact_missed_the_budget() -> None:
    space = line()
    first = choose(space, 0.5)
    space.log[first.high] = math.inf
    space.missed.add(first.high)
    assert choose(space, 0.5).predicted_error >= 0.9 * first.predicted_error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_unsafe_scope_stays_fp32_even_where_one_run_happens_to_hold(strategy: str) -> None:
    problem = drawn("chain", strategy, random.Random(1), unsafe=0.0)
    bad = next(name for name, node in problem.capture.nodes.items() if node.owner == "2")
    problem = replace(problem, verdicts={**problem.verdicts, bad: Verdict("unsafe", "it overflows")})
    assert must_stay_fp32(problem) == {"2"}
    space = Foretold(problem, 0.01, off=0.0)
    assert "2" in choose(space, 0.01).high
    assert "2" in space.propose(math.inf).high


def test_everything_low_is_not_proposed_where_the_model_itself_was_over_the_budget() -> None:
    problem = drawn("chain", "autocast", random.Random(3), unsafe=0.0)
    low = Foretold(problem, 1.0).propose(math.inf)
    assert not low.high
    again = Foretold(problem, 0.5, known=[(low, 1.0)])
    assert choose(again, 2 * low.predicted_error) != low
    assert low not in again.asked


# Why operations are not low in modules that are: each clause on a model in which it is true.


def every(m: Any, x: Tensor) -> Tensor:
    low = m.layer(x)
    with torch.autocast("cuda", enabled=False):
        off = low.float() @ torch.eye(8)
    single = low.softmax(-1)
    negated = -single
    ramp = torch.arange(8).sin()
    scaled = m.scale.neg()
    double = x.double().cos()
    return off + negated + ramp + scaled + double.float()


def why(strategy: str = "autocast") -> dict[str, Reason]:
    capture = capture_of(Model(every, layer=nn.Linear(8, 8), scale=nn.Parameter(torch.ones(8))), normal(4, 8))
    problem = problem_of(capture, strategy)
    found = operation_reasons(problem, problem.evaluate(()))
    ops = {name: node.op.removeprefix("aten.").partition(".")[0] for name, node in capture.nodes.items()}
    return {f"{ops[name]} {name}": reason for reason in found for name in reason.operations}


@pytest.mark.parametrize(
    ("op", "kind", "words"),
    [
        ("softmax softmax", "strategy", "autocast always runs softmax in FP32"),
        ("neg neg", "inherited", "reads FP32 from softmax, since autocast always runs softmax in FP32"),
        ("matmul matmul", "author", "the model's code switches autocast off there"),
        ("arange arange", "not-floating", "not a floating-point operation"),
        ("sin sin", "author", "the model's code creates values in FP32"),
        ("neg neg_1", "inherited", "reads FP32 from the parameter scale"),
        ("cos cos", "author", "the model's code computes in float64, which no plan lowers"),
    ],
)
def test_each_reason(op: str, kind: str, words: str) -> None:
    found = why()
    assert op in found, found.keys()
    assert (found[op].kind, found[op].words) == (kind, words)


def test_what_runs_low_has_none() -> None:
    assert not [name for name in why() if name.startswith("linear")]
    assert not [name for name in why("cast") if name.startswith(("linear", "softmax"))]


def norm(m: Any, x: Tensor) -> Tensor:
    """By hand, as repeated blocks have it."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return m.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def of_blocks(count: int, strategy: str) -> tuple[Reason, ...]:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Model(norm, weight=nn.Parameter(torch.ones(8))))

    capture = capture_of(nn.Sequential(*(block() for _ in range(count))), normal(4, 8))
    problem = problem_of(capture, strategy)
    return operation_reasons(problem, problem.evaluate(()))


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_what_blocks_have_in_common_is_one_reason(strategy: str) -> None:
    two, five = of_blocks(2, strategy), of_blocks(5, strategy)
    assert [reason.words for reason in two] == [reason.words for reason in five]
    assert [len(reason.operations) * 5 for reason in two] == [len(reason.operations) * 2 for reason in five]


def test_fp32_is_followed_to_where_it_begins() -> None:
    assert [(reason.words, reason.operations) for reason in of_blocks(1, "cast")] == [
        ("the model's code requests FP32", ("to",)),
        ("reads FP32 from to, since the model's code requests FP32", ("pow_1", "mean", "add", "rsqrt", "mul")),
    ]


def branching(m: Any, x: Tensor, first: bool) -> Tensor:
    """Called twice, its own product and that of a layer in it the other way round."""
    if first:
        return nn.functional.linear(m.layer(x), m.weight)
    return m.layer(nn.functional.linear(x, m.weight))


def test_what_a_module_around_keeps_says_so() -> None:
    """And is what the run itself computes in FP32, beside the module's own call."""
    block = Model(branching, layer=nn.Linear(8, 8), weight=nn.Parameter(torch.ones(8, 8)))
    capture = capture_of(Model(lambda m, x: m.block(m.block(x, True), False), block=block), normal(4, 8))
    problem = problem_of(capture, "autocast")
    high = frozenset({function_in("block", "linear")})
    problem.__dict__["exceptions"] = {"block": frozenset({"linear"})}
    chosen = Candidate(high, 0.0, 0.0)
    found = [reason for reason in operation_reasons(problem, chosen) if reason.kind == "inherited"]
    assert [(reason.words, reason.by) for reason in found] == [("block keeps every call of linear in FP32", "block")]
    assert [capture.nodes[name].owner for name in found[0].operations] == ["block.layer"] * 2
    computed = problem.resolve(choice_keeping(high, "fp16")).computed_format
    assert all(computed(name) == "fp32" for name in found[0].operations)


@pytest.mark.parametrize(
    ("before", "after", "saves", "kind", "said"),
    [
        (0.00163, 0.00162, 0.001, "no-gain", "leaves the error at 0.00162"),
        (0.00163, 0.001631, 0.07, "margin", "leaves the error at 0.00163"),
        (0.00163, 0.00164, 0.07, "margin", "increases the error from 0.00163 to 0.00164"),
    ],
)
def test_an_error_that_falls_or_stays_is_not_called_increased(
    before: float, after: float, saves: float, kind: str, said: str
) -> None:
    effect = modules.Effect(before, after, ran=True, adds=after - before, left=0.01 - before, saves=saves, failure="")
    space = SimpleNamespace(budget=0.01, what="error", problem=SimpleNamespace(objective="time"))
    reason = modules.explain_effect(space, effect)
    assert (reason.kind, said in reason.words) == (kind, True), reason
    assert ("increase" in reason.words) == (f"{after:.3g}" > f"{before:.3g}")


def test_the_numbers_stand_in_the_clause() -> None:
    said = "the error from 0.0079 to 0.0131 (limit 0.008: the budget less a margin), and saves at most 1.3% of the time"
    expected = f"low precision there increases {said}"
    assert explain_budget(0.0079, 0.0131, 0.01, 0.013, "time", "increases the error") == expected
    assert "inf" not in explain_budget(0.001, math.inf, 0.01, 0.07, "time", "increases the error").split()
    assert explain_gain(-0.2, "time") == "saves no time"
    assert explain_gain(0.0004, "flops") == "saves at most 0.1% of the FP32 FLOPs"
