"""All plans of an audit: searched, verified as the artefact a user gets, improved and explained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..execution.chosen import labelled
from ..numerics.formats import runs
from ..records import Baseline, Plan
from .choices import accepted, as_another, as_candidate, as_plan, everything, ruled
from .modules import Modules, all_low_will_do
from .problem import Problem
from .reasons import Weighed, with_reasons
from .recommend import gains
from .search import MARGIN, WORTH, cheapest, choose, verified
from .solve import Candidate
from .trial import Trial
from .verified import Tick, is_outdone, verify
from .workbench import Workbench

PROMISING = 1.5
"""How many times the budget everything low may be predicted to take and is tried all the same: a run costs little, and
predictions are that far off."""

NONE: Mapping[str, Plan] = {}


def everything_low(bench: Workbench, strategies: Sequence[str], formats: Sequence[str], tick: Tick) -> dict[str, Plan]:
    """The plans with everything low, verified, of those strategies and formats in which that is safe, fast and may hold: where it
    does, it is the plan."""
    problems = [bench.problem(strategy, fmt) for strategy in strategies for fmt in formats]
    plans = {
        problem.name: as_plan(problem, everything(problem, problem.format))
        for problem in problems
        if runs(problem.format) and all_low_will_do(problem, PROMISING * bench.max_error)
    }
    return verify(bench, plans, tick)


def plans_of(
    bench: Workbench,
    strategies: Sequence[str],
    formats: Sequence[str],
    baselines: Mapping[str, Baseline],
    tick: Tick,
    plain: Mapping[str, Plan] = NONE,
) -> dict[str, Plan]:
    """Every plan, verified on inputs it was not made from where there are any.

    plain: plans with everything low that were run; for one that holds, no other is searched.
    """
    problems = {f"{strategy}_{fmt}": bench.problem(strategy, fmt) for strategy in strategies for fmt in formats}
    trial = bench.trial(bench.usable(bench.subject.batches))
    spaces = {
        name: Modules(problem, trial, bench.max_error, _known(bench, problem, trial, baselines[name]))
        for name, problem in problems.items()
    }
    checked = bench.trial(bench.usable(bench.checks) or bench.usable(bench.subject.batches))
    weighing = {
        name: Modules(problem, checked, bench.max_error, [_all_low(problem, baselines[name])])
        for name, problem in problems.items()
    }

    def make(name: str, limit: float) -> Candidate:
        tick(name.replace("_", " "))
        if bench.quick:
            return choose(spaces[name], limit, 0)
        found = choose(spaces[name], limit)
        if limit < MARGIN * bench.max_error or not runs(problems[name].format):
            return found  # an artefact did not bear out what replays said
        with weighing[name].incremental():
            return Weighed(weighing[name], found).improved()

    def run(chosen: Mapping[str, Candidate]) -> dict[str, Plan]:
        return verify(bench, {name: as_plan(problems[name], point) for name, point in chosen.items()}, tick)

    def holds(name: str, plan: Plan) -> bool:
        return not runs(plan.format) or (plan.verified and not is_outdone(plan, baselines[name]))

    found = {name: plan for name, plan in plain.items() if plan.verified}
    found |= verified({n: s for n, s in spaces.items() if n not in found}, bench.max_error, make, run, holds)[1]
    harmful = [name for name, plan in found.items() if is_outdone(plan, baselines[name])]
    found |= run({name: cheapest(spaces[name].holding(), spaces[name].nothing) for name in harmful})
    useless = [] if bench.quick else [name for name, plan in found.items() if runs(plan.format) and not gains(plan)]
    instead = run({name: cheapest(points[1:], points[0]) for name in useless if (points := spaces[name].holding())})
    found |= {name: plan for name, plan in instead.items() if gains(plan) and holds(name, plan)}
    shared = run({} if bench.quick else dict(_shared(spaces, found)))
    found |= {name: plan for name, plan in shared.items() if gains(plan) and holds(name, plan)}
    for name in problems:
        tick(f"why {name.replace('_', ' ')}")
        with weighing[name].incremental():
            found[name] = with_reasons(weighing[name], found[name], bench.findings)
    return {name: found[name] for name in problems}


def _known(bench: Workbench, problem: Problem, trial: Trial, baseline: Baseline) -> Iterator[tuple[Candidate, float]]:
    """Choices whose error is known before any search: everything low, what the rules keep, and, where the first does not run,
    what of it does."""
    yield _all_low(problem, baseline)
    if (alone := baseline.rules_only) is not None:
        yield ruled(problem, bench.findings), _error(alone.measured_error)
    if baseline.failure is not None and not bench.quick and (point := accepted(problem, trial)) is not None:
        yield point, trial.error(problem.running(labelled(point.precision)))


def _all_low(problem: Problem, baseline: Baseline) -> tuple[Candidate, float]:
    return everything(problem, problem.format), _error(baseline.measured_error)


def _error(measured: float | None) -> float:
    """What was measured; of what failed or was not finite, inf."""
    return math.inf if measured is None else measured


def _shared(spaces: Mapping[str, Modules], plans: Mapping[str, Plan]) -> Iterator[tuple[str, Candidate]]:
    """Plans of another strategy in the same format that are better by the objective, and whose scopes hold here too in a replay."""
    for name, space in spaces.items():
        own, problem = plans[name], space.problem
        rivals = [plan for plan in plans.values() if plan.format == own.format and plan.strategy != own.strategy]
        points = [as_another(problem, plan) for plan in rivals if gains(plan)]
        best = cheapest([point for point in points if point.feasible], space.nothing)
        cheaper = best.cost < (1 - WORTH) * as_candidate(problem, own).cost or not gains(own)
        if best != space.nothing and cheaper and space.error(best) <= MARGIN * space.budget:
            yield name, best
