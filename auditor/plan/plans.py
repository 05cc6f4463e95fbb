"""Searches for all plans of an audit, improves and explains each, and verifies it as the user's patched model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ..criteria.measure import Criteria
from ..execution.beside import scopes_of
from ..execution.policy import choice_keeping, plain
from ..numerics.formats import FORMATS, runs
from ..records import Plan, Verification
from ..resources import table
from ..stages import tick
from .context import PlanningContext
from .modules import Modules, improve, with_reasons
from .problem import Problem
from .recommend import gains
from .search import WORTH, Candidate, Choice, choose, find_verified
from .verified import verify


class Planner:
    """Makes all requested plans; no plan runs twice."""

    def __init__(self, planning: PlanningContext, baselines: Mapping[str, Verification]) -> None:
        """baselines: {plan: the run of its strategy and format with everything in low precision}."""
        self.planning, asked = planning, planning.options
        replayed = partial(planning.replay, planning.subject.batches)
        problems = [planning.problem(strategy, fmt) for strategy in asked.scope_strategies for fmt in asked.formats]
        what = "largest share of a limit" if isinstance(planning.output_metric.distance, Criteria) else "error"
        self.spaces = {problem.name: Modules(problem, replayed, planning.max_error, what) for problem in problems}
        self._ran: dict[tuple[str, Choice], Plan] = {}
        self._chosen: dict[str, Candidate] = {}
        for name, space in self.spaces.items():
            self._note_baseline(name, space, baselines[name])

    def _note_baseline(self, name: str, space: Modules, ran: Verification) -> None:
        """Record the run with everything in low precision, so that the search does not repeat it."""
        low = space.low.high
        space.log[low] = _error_of(ran)
        if ran.failure:
            space.failures[low] = ran.failure
        if runs(space.problem.format):
            self._ran[name, low] = replace(self._plan_of(name, space.low), verification=ran)

    def plans(self) -> dict[str, Plan]:
        """Make all plans, and verify them on the held-out inputs or, without them, on the calibration inputs."""
        result = find_verified(self.spaces, self.planning.max_error, self.make, self._run)
        for name, space in self.spaces.items():
            tick(f"why {name.replace('_', ' ')}")
            result[name] = plan = with_reasons(space, result[name], self.planning.findings)
            if runs(plan.format) and not plan.has_low and not self.planning.options.quick:
                result[name] = replace(plan, reach=space.reach())
        self.planning.replays.forget()
        return result

    def make(self, limits: Mapping[str, float]) -> dict[str, Candidate]:
        """{plan: the cheapest choice found within its limit}. Candidates are the search's improved result, another
        strategy's choice in the same format, and everything in low precision except outputs of some matrix products."""
        quick = self.planning.options.quick
        for name, limit in limits.items():
            tick(name.replace("_", " "))
            space = self.spaces[name]
            if quick:
                self._chosen[name] = space.propose(limit)
            else:
                self._chosen[name] = improve(space, choose(space, limit), limit)
        if not quick:
            for name, limit in limits.items():
                self._chosen[name] = self._best_known(name, limit)
        return {name: self._chosen[name] for name in limits}

    def _best_known(self, name: str, limit: float) -> Candidate:
        """A plan's choice, or a cheaper one within the limit among the other candidates."""
        space = self.spaces[name]
        problem = space.problem
        own = self._chosen[name]
        points = list[Candidate]()
        for other, other_space in self.spaces.items():
            if other_space.problem.format == problem.format:
                points.append(problem.evaluate(self._chosen[other].high))
        points += _with_fewest_outputs(problem, space.low, limit)
        better = [point for point in points if point.feasible and point.cost < (1 - WORTH) * own.cost]
        low = self._ran.get((name, space.low.high))
        if own == space.nothing and not better and low is not None and gains(low):
            better = space.within_budget()  # all low meets the budget: use it, however little it saves
        better.sort(key=attrgetter("price"))
        return next((point for point in better if space.error(point) <= limit), own)

    def _run(self, chosen: Mapping[str, Candidate]) -> dict[str, Plan]:
        """Verify the plans of these choices of precisions; plans that already ran are not run again."""
        new = dict[str, Plan]()
        for name, point in chosen.items():
            if (name, point.high) not in self._ran:
                new[name] = self._plan_of(name, point)
        for name, plan in verify(self.planning, new).items():
            self._ran[name, chosen[name].high] = plan
        return {name: self._ran[name, point.high] for name, point in chosen.items()}

    def _plan_of(self, name: str, point: Candidate) -> Plan:
        """The plan of a choice of precisions, before it ran."""
        subject = self.planning.subject
        plan = as_plan(self.spaces[name].problem, point)
        return replace(plan, upcast=subject.upcast, stored_low=subject.stored_low)


def _error_of(ran: Verification) -> float:
    """The error that counts for the search; inf if a criterion was missed, or the run failed."""
    return ran.worst_error if all(one.holds for one in ran.criteria) else math.inf


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """Build the plan of a choice of precisions, with predicted errors and times, without a run."""
    choice = choice_keeping(chosen.high, problem.format)
    resolution = problem.resolve(choice)
    low_flops = float(problem.figures(resolution)[3].sum())
    flops = sum(cost.flops for cost in problem.costs.values())
    speedup = 1.0
    if chosen.seconds:
        speedup = problem.evaluate(problem.energy.scopes).seconds / chosen.seconds
    row = FORMATS[problem.format]
    note = ""
    if row.speed not in table("plan/devices")[problem.device]:
        note = f"the {problem.device} has no {row.label} arithmetic: a speed-up only comes from moving fewer bytes"
    return Plan(
        name=problem.name,
        strategy=problem.strategy,
        format=problem.format,
        scopes=scopes_of(problem.policy_for(choice)),
        predicted_error=chosen.predicted_error,
        low_precision_flops=low_flops / max(flops, 1),
        predicted_speedup=speedup,
        note=note,
        objective=problem.objective,
        target=problem.device,
        memory=problem.memory(resolution),
        fp32_memory=problem.memory(problem.resolve(plain("fp32"))),
    )


def _with_fewest_outputs(problem: Problem, low: Candidate, limit: float) -> Iterator[Candidate]:
    """Yield one choice, if any has a predicted error within `limit`: everything in low precision, except outputs of the
    fewest possible sensitive or unsafe products, chosen by squared error per output element."""

    def error_per_element(path: str) -> float:
        """Squared error of a function's products by their own rounding, per element of their outputs."""
        names = problem.products[path]
        known = [problem.contribution(name, problem.format) for name in names]
        squares = sum(contribution.own**2 for contribution in known if contribution is not None)
        elements = sum(problem.elements[name] for name in names)
        return squares / max(elements, 1)

    doubtful = {name for name, known in problem.verdicts.items() if known.verdict in ("sensitive", "unsafe")}
    able = (path for path, names in problem.products.items() if names & doubtful)
    order = sorted(able, key=error_per_element, reverse=True)
    choices = [low.high.union(order[: number + 1]) for number in range(len(order))]
    fewest = bisect_left(choices, True, key=lambda high: problem.evaluate(high).predicted_error <= limit)
    if fewest < len(choices):
        yield problem.evaluate(choices[fewest])
