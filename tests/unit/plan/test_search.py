"""The one search: predictions propose, replays dispose."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.plan.mincut import Candidate
from auditor.plan.search import MARGIN, ROUNDS, RUNS, Space, choose, find_verified
from auditor.records import Plan, ScopeChoice, Verdict, Verification
from tests.support.planning import Foretold
from tests.support.problems import drawn, must_stay_fp32


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
        return [point for point in self.known if self.key(point) not in self.rejected]


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
    assert len(space.asked) <= RUNS + 1


def test_nothing_is_run_where_a_choice_is_known_to_hold_and_no_other_is_cheaper() -> None:
    space = Line(line().points, [1.0] * 100, known=[made(100, 0.9)])
    assert choose(space, 0.5) == space.known[0]
    assert space.asked == []
    space.rejected.add(space.key(space.known[0]))
    assert choose(space, 0.5).predicted_error == 0.5


def test_what_is_known_to_hold_and_dearer_than_fp32_is_not_chosen() -> None:
    space = Line([], [], known=[made(2e9, 0.1)])
    assert choose(space, 0.5) == space.nothing


def test_without_runs_the_prediction_decides() -> None:
    space = line(off=10)
    assert choose(space, 0.5, 0).predicted_error == 0.5
    assert space.asked == []


PLAN = Plan("cast_fp16", "cast", "fp16", {"": ScopeChoice("fp16")}, 0.0, 1.0, 1.0)


def test_what_its_artefact_does_not_bear_out_is_made_for_less_error() -> None:
    space, limits = line(), list[float]()

    def make(wanted: Mapping[str, float]) -> dict[str, Candidate]:
        limits.extend(wanted.values())
        return {name: choose(space, limit) for name, limit in wanted.items()}

    def verify(made: Mapping[str, Candidate]) -> dict[str, Plan]:
        return {
            name: replace(PLAN, verification=Verification(3 * point.predicted_error)) for name, point in made.items()
        }

    def holds(name: str, plan: Plan) -> bool:
        return plan.measured_error is not None and plan.measured_error <= 0.5

    plans = find_verified({"a": space}, 0.5, make, verify, holds)
    assert holds("a", plans["a"])
    assert limits[0] == MARGIN * 0.5
    assert limits == sorted(limits, reverse=True)
    assert len(space.rejected) == len(limits) - 1
    limits.clear()
    never = find_verified({"a": line()}, 0.5, make, verify, lambda name, plan: False)
    assert len(limits) == ROUNDS
    assert set(never) == {"a"}
    limits.clear()
    find_verified(
        {"a": line()}, 0.5, make, lambda made: {"a": PLAN}, lambda name, plan: False
    )  # it fails: there is no error
    assert limits[:2] == [MARGIN * 0.5, MARGIN * 0.5 / 4]


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
