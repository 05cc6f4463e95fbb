"""Cuts against every labelling there is, and the rules that the cheapest choice must not break."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.execution.policy import choice_from_scopes, choice_keeping, plain
from auditor.plan.costs import Cost
from auditor.plan.plans import as_plan
from auditor.plan.problem import Problem
from auditor.plan.search import FORBIDDEN, Candidate, Energy, choose
from auditor.records import Contribution, ScopeChoice, Verdict
from tests.support.planning import Foretold
from tests.support.problems import captured, drawn, fp32_of, labellings, owners_of, problem_of, tied_owners, with_region
from tests.support.subjects import capture_of, normal

KINDS = ["chain", "branches", "tied", "held"]
seeds = st.integers(0, 2**32).map(random.Random)


def value_of(energy: Energy, labels: dict[str, str], multiplier: float) -> float:
    """The sum that a cut minimizes, written out once more."""
    total = 0.0
    for owner, (low, high, error) in energy.scopes.items():
        total += high if labels[owner] == "fp32" else low + multiplier * error
    for (producer, consumer), (error, elapsed) in energy.pairs.items():
        if labels[producer] != labels[consumer]:
            total += elapsed + (multiplier * error if labels[producer] == "fp32" else 0.0)
    return total + energy.island * sum(labels[owner] != labels[above] for owner, above in energy.tree.items())


def is_allowed(energy: Energy, labels: dict[str, str]) -> bool:
    """Whether a tied weight can be stored so that all who read it can work with it."""
    shielded = all(labels[owner] == "fp32" or labels[energy.tree[owner]] != "fp32" for owner in energy.shielded)
    return shielded and all(labels[a] == labels[b] for a, b in energy.tied)


def solved(problem: Problem) -> list[Candidate]:
    """The cheapest choices for budgets over all decades, and without one."""
    return [problem.cheapest(allowed) for allowed in (0.0, 1e-4, 1e-3, 1e-2, 0.1, math.inf)]


@settings(max_examples=10, deadline=None, derandomize=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [*KINDS, "flat"])
@given(rnd=seeds)
def test_a_cut_is_the_least_of_all_labellings(kind: str, strategy: str, rnd: random.Random) -> None:
    energy = drawn(kind, strategy, rnd, unsafe=0.3 if kind == "flat" else 0.1, exceptions=kind == "flat").energy
    owners = sorted(energy.scopes)
    allowed = [labels for labels in labellings(owners) if is_allowed(energy, labels)]
    for multiplier in (0.0, 1e-3, 0.1, 1.0, 10.0, 1e4):
        high = energy.cuts.best(multiplier)
        labels = {owner: "fp32" if owner in high else "fp16" for owner in owners}
        assert labels in allowed
        least = min(value_of(energy, other, multiplier) for other in allowed)
        assert value_of(energy, labels, multiplier) <= least * (1 + 1e-6)
        price, square = energy.cuts.value(high)
        assert price + multiplier * square == pytest.approx(value_of(energy, labels, multiplier))


@settings(max_examples=10, deadline=None, derandomize=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [*KINDS, "flat"])
@given(rnd=seeds)
def test_what_is_cheapest_keeps_the_limit_and_what_is_unsafe(kind: str, strategy: str, rnd: random.Random) -> None:
    problem = drawn(kind, strategy, rnd, unsafe=0.3, exceptions=kind == "flat")
    points = solved(problem)
    assert all(point.feasible for point in points)
    assert points[0].predicted_error == 0.0
    for point in points:  # an operation that follows its inputs is safe behind FP32 even where its module may run low
        resolution = problem.resolve(choice_keeping(point.high, "fp16"))
        assert not any(problem.is_forbidden(resolution, name) for name in problem.capture.nodes)
        shielded = {path for path in problem.energy.shielded if path not in point.high}
        assert all(problem.energy.tree[path] not in point.high for path in shielded)
    prices = [point.price for point in points]
    assert all(after <= before * 1.02 for before, after in itertools.pairwise(prices))
    if kind == "tied" and strategy == "cast":
        assert all(len(point.high & {"first", "last"}) != 1 for point in points)


@settings(max_examples=6, deadline=None, derandomize=True)
@pytest.mark.parametrize("objective", ["time", "flops"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [*KINDS, "flat", "shielded"])
@given(rnd=seeds)
def test_no_labelling_is_below_the_bounds(kind: str, strategy: str, objective: str, rnd: random.Random) -> None:
    problem = replace(drawn(kind, strategy, rnd, exceptions=kind == "flat"), objective=objective)
    assert problem.least > 0
    points = map(problem.evaluate, map(fp32_of, labellings(sorted(problem.energy.scopes))))
    assert all(problem.least <= point.price * (1 + 1e-9) for point in points)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [*KINDS, "flat", "shielded"])
def test_memory_has_no_bound_but_zero(kind: str, strategy: str) -> None:
    problem = replace(drawn(kind, strategy, random.Random(0), exceptions=kind == "flat"), objective="memory")
    assert problem.least == 0.0
    points = map(problem.evaluate, map(fp32_of, labellings(sorted(problem.energy.scopes))))
    assert all(point.price >= 0.0 for point in points)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everything_low_is_not_compared_with_choices_that_cannot_be_cheaper(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = blank("chain", strategy)
    space = Foretold(problem, 1.0)
    space.least = 0.0
    searched = choose(space, 1.0)
    monkeypatch.setattr(Problem, "cheapest", None)  # any search would raise
    assert choose(Foretold(problem, 1.0), 1.0) == searched == space.low
    with pytest.raises(TypeError):  # over the budget
        choose(Foretold(problem, 1.0, known=[(space.low, 2.0)]), 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scopes_that_read_the_same_input_are_free_of_each_other(strategy: str) -> None:
    problem = blank("towers", strategy)
    left = next(name for name, node in problem.capture.nodes.items() if node.owner == "left")
    point = with_errors(problem, {left: Contribution(1.0, 1.0, 0.0)}).cheapest(0.0)
    assert point.high & {"left", "right"} == {"left"}


def blank(kind: str, strategy: str) -> Problem:
    """No error anywhere, and a tenth of a second's worth of FP32 arithmetic in every node."""
    cost = Cost(1_950_000_000_000, 1000, False)  # 19.5 TFLOP/s in FP32, 312 low
    return problem_of(captured(kind), strategy, cost=cost)


def with_errors(problem: Problem, errors: dict[str, Contribution]) -> Problem:
    return replace(problem, contributions={"fp16": {**problem.contributions["fp16"], **errors}})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_error_everything_is_low(strategy: str) -> None:
    problem = blank("chain", strategy)
    best = problem.cheapest(0.0)
    assert not best.high
    assert (best.predicted_error, as_plan(problem, best).low_precision_flops) == (0.0, 1.0)
    assert best.seconds == pytest.approx(5 * 1.95 / 312, rel=1e-3)  # five products of 1.95 TFLOP at 312 TFLOP/s


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_one_bad_scope_is_the_one_that_stays(strategy: str) -> None:
    problem = blank("chain", strategy)
    bad = next(name for name, node in problem.capture.nodes.items() if node.owner == "2")
    problem = with_errors(problem, {bad: Contribution(1.0, 0.5, 0.0)})
    assert problem.cheapest(math.inf).predicted_error == pytest.approx(0.5)
    exact = problem.cheapest(0.0)
    assert exact.high & set("01234") == {"2"}
    assert as_plan(problem, exact).low_precision_flops == pytest.approx(4 / 5)


def test_errors_add_in_quadrature_each_rounding_once() -> None:
    problem = blank("chain", "autocast")
    first, second, *_ = problem.capture.nodes
    (x,) = (placeholder.name for placeholder in problem.capture.placeholders if placeholder.kind == "input")
    problem = with_errors(
        problem,
        {first: Contribution(9.0, 0.3, 0.7), second: Contribution(9.0, 0.4, 0.7), x: Contribution(9.0, 9.0, 1.2)},
    )
    low = problem.evaluate(())
    # the operations' own 0.3 and 0.4, the input's cast 1.2: sqrt(0.09 + 0.16 + 1.44) = 1.3; no cast between low nodes
    assert low.predicted_error == pytest.approx(1.3)
    island = problem.evaluate(("1",))
    # the first result is low as it is (0.3); the second is FP32 and is cast into the third: sqrt(1.44 + 0.09 + 0.49)
    assert island.predicted_error == pytest.approx((1.44 + 0.09 + 0.49) ** 0.5)


@settings(max_examples=2, deadline=None, derandomize=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["chain", "branches", "tied", "towers"])
@given(rnd=seeds)
def test_the_chosen_plan_is_within_one_percent_of_the_best(kind: str, strategy: str, rnd: random.Random) -> None:
    """Where every run comes out as predicted."""
    problem = drawn(kind, strategy, rnd)
    ties = tied_owners(problem.capture) if strategy == "cast" else []
    pairs = [pair for group in ties for pair in itertools.pairwise(group)]
    allowed = (x for x in labellings(owners_of(problem.capture)) if all(x[a] == x[b] for a, b in pairs))
    everything = [problem.evaluate(fp32_of(labels)) for labels in allowed]
    for budget in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2):
        least = min(point.price for point in everything if point.predicted_error <= budget)
        found = choose(Foretold(problem, budget), budget)
        assert found.predicted_error <= budget
        assert found.price <= 1.01 * least, budget


# Choices with names, and choices as plans: the table of scopes, what a plan gains.


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["chain", "branches", "tied"])
def test_the_table_of_scopes_says_what_was_chosen_and_no_more(kind: str, data: st.DataObject) -> None:
    problem = drawn(kind, "autocast", random.Random(0), unsafe=0.0)
    owners = owners_of(problem.capture)
    labels = {owner: data.draw(st.sampled_from(["fp16", "fp32"]), label=owner) for owner in owners}
    chosen = problem.evaluate(fp32_of(labels))
    scopes = as_plan(problem, chosen).scopes
    precision = choice_from_scopes(scopes)
    assert {owner: precision(owner) for owner in owners} == labels
    assert "" in scopes
    for path, choice in scopes.items():
        above = {other: kept for other, kept in scopes.items() if other != path}
        assert path == "" or choice_from_scopes(above)(path) != choice.precision  # each line is needed


def low(owners: str) -> dict[str, str]:
    """The root and these layers in FP16."""
    return {"": "fp16", **dict.fromkeys(owners, "fp16")}


def plan_of(problem: Problem, labels: dict[str, str]) -> dict[str, ScopeChoice]:
    return as_plan(problem, problem.evaluate(fp32_of(labels))).scopes


def test_an_island_keeps_its_result_where_only_fp32_reads_it() -> None:
    problem = drawn("chain", "cast", random.Random(0), unsafe=0.0)
    end = plan_of(problem, {**low("0123"), "4": "fp32"})
    assert end["4"].output == "keep"  # the model's output: nothing low reads it
    middle = plan_of(problem, {**low("0134"), "2": "fp32"})
    assert middle["2"].output == "cast"
    pair = plan_of(problem, {**low("014"), "2": "fp32", "3": "fp32"})
    assert (pair["2"].output, pair["3"].output) == ("keep", "cast")


@pytest.mark.parametrize(
    ("device", "fmt", "word"), [("T4", "bf16", "no BF16"), ("T4", "fp16", ""), ("H100", "bf16", "")]
)
def test_a_plan_is_made_for_a_device(device: str, fmt: str, word: str) -> None:
    problem = replace(drawn("chain", "autocast", random.Random(3), unsafe=0.0), device=device, format=fmt)
    plan = as_plan(problem, problem.evaluate(()))
    assert plan.target == device
    assert word in plan.note
    assert bool(word) == bool(plan.note)
    assert plan.predicted_speedup == pytest.approx(plan_times(problem, "fp32") / plan_times(problem, fmt))


def plan_times(problem: Problem, precision: str) -> float:
    return problem.evaluate(owners_of(problem.capture) if precision == "fp32" else ()).seconds


# What the solver weighs: prohibitions, squares of errors, and which values are rounded.


def problem(strategy: str = "autocast", verdict: str = "safe", own: float = 0.3) -> Problem:
    each = Contribution(0.5, own, 0.04)
    return problem_of(captured("chain"), strategy, each=each, cost=Cost(10**9, 10**4, False), verdict=verdict)


@pytest.mark.parametrize(
    ("verdict", "own", "low", "wide"),
    [
        ("safe", 0.3, 0.09, 0.0),
        ("sensitive", 0.3, 0.09, 0.0),
        ("unsafe", 0.3, FORBIDDEN, 0.0),
        ("untested", 0.3, FORBIDDEN, 0.0),
        ("safe", float("inf"), FORBIDDEN, 0.0),  # cuts need finite numbers
    ],
)
def test_what_running_a_node_low_adds(verdict: str, own: float, low: float, wide: float) -> None:
    found = problem(verdict=verdict, own=own)
    (name, *_) = found.capture.nodes
    assert found.node_square(found.resolve(plain("fp16")), name) == pytest.approx(low)
    assert found.node_square(found.resolve(plain("fp32")), name) == wide


def test_a_node_without_a_verdict_is_not_forbidden() -> None:
    found = replace(problem(), verdicts={})
    (name, *_) = found.capture.nodes
    assert not found.is_forbidden(found.resolve(plain("fp16")), name)


def test_what_the_author_runs_low_himself_no_plan_forbids() -> None:
    """`first` runs in BF16: it counts with what was measured in BF16, so does what enters it, and an FP16 verdict
    is none of it."""
    capture = capture_of(with_region(), normal(4, 4))
    names = [*capture.nodes, *(place.name for place in capture.placeholders)]
    fp16, bf16 = (dict.fromkeys(names, Contribution(0.5, own, 10 * own)) for own in (0.3, 0.02))
    unsafe = dict.fromkeys(capture.nodes, Verdict("unsafe", ""))
    costs = dict.fromkeys(capture.nodes, Cost(10**9, 10**4, False))
    found = Problem(capture, costs, {"fp16": fp16, "bf16": bf16}, unsafe, "autocast", "fp16", "A100")
    first, second = (node.name for node in capture.nodes.values() if node.op == "aten.linear.default")
    low, wide = found.resolve(plain("fp16")), found.resolve(plain("fp32"))
    assert [found.node_square(each, first) for each in (low, wide)] == pytest.approx([0.02**2, 0.02**2])
    assert [found.node_square(each, second) for each in (low, wide)] == [FORBIDDEN, 0.0]
    (x,) = (place.name for place in capture.placeholders if place.kind == "input")
    assert found.cast_square(low, x, low.readers_of_rounded.get(x, ())) == pytest.approx(0.2**2)
    # no time is saved by running it in low precision
    assert found.energy.scopes["first"][0] == found.energy.scopes["first"][1]
    assert found.energy.scopes["second"][0] < found.energy.scopes["second"][1]
