"""The search for 16-bit plans against a long random search on eight small models, in predicted time at the budget."""

import random
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from auditor.plan.modules import Modules
from auditor.plan.search import MARGIN, Candidate
from tests.support.planning import planner_of, planning_of
from tests.support.searched import MODELS

pytestmark = pytest.mark.slow

RUNS = 100
"""Replays of one random search; the audit's own search has at most a tenth of them."""

IDLE = 25
"""Changes in a row without an improvement, after which the random search starts again."""


def best_by_chance(space: Modules, limit: float, *starts: Candidate) -> Candidate:
    """The cheapest choice of many climbs, each of which moves random modules while replays stay within the limit."""
    draw = random.Random(0)
    groups = space.problem.energy.groups
    known = [space.nothing, *starts]
    left = RUNS
    while left > 0:
        at = draw.choice(known)
        if draw.random() < 0.5:
            at = space.problem.cheapest(limit * 10 ** draw.uniform(-1, 1))
        if not space.error(at) <= limit:
            at = space.nothing
        idle = 0
        while left > 0 and idle < IDLE:
            idle += 1
            lowered = frozenset[str]().union(*draw.sample(groups, min(draw.choice((1, 2, 4)), len(groups))))
            raised = draw.choice(groups) if draw.random() < 0.2 else frozenset[str]()
            other = space.problem.evaluate(at.high - lowered | raised)
            if not other.feasible or other.price >= at.price:
                continue
            left -= other.high not in space.log
            if space.error(other) <= limit:
                at, idle = other, 0
        left -= 1  # a climb costs a run, whatever it finds, so that the search ends
        known = sorted([*known, at], key=lambda point: point.price)[:8]
    return known[0]


@pytest.mark.parametrize("budget", [0.01, 0.003])
@pytest.mark.parametrize("build", MODELS)
def test_no_long_random_search_is_a_fifth_faster(build: Callable[[], tuple[nn.Module, Tensor]], budget: float) -> None:
    model, x = build()
    planner = planner_of(planning_of(model.eval(), x, formats=("bf16",), max_error=budget))
    limit = MARGIN * budget
    made = planner.make(dict.fromkeys(planner.spaces, limit))
    for name, space in planner.spaces.items():
        own = made[name]
        assert own == space.nothing or space.error(own) <= budget  # all low may use the whole budget
        best = best_by_chance(space, limit, own)
        print(f"{build.__name__}, {budget}, {name}: {own.seconds / best.seconds - 1:.1%}")
        assert own.seconds <= 1.2 * best.seconds, name
