"""All plans of an audit: searched, verified as the artefact a user gets, improved and explained."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..numerics.formats import runs
from ..records import Plan, Verification
from ..stages import tick
from .modules import Modules, as_candidate, as_plan
from .nonfinite import of_replay
from .reasons import improve, with_reasons
from .recommend import gains, has_low
from .search import MARGIN, WORTH, choose, verified
from .solve import Candidate
from .verified import is_outdone, verify
from .workbench import Workbench


class Planner:
    """What happens without a plan, and the plans, of some strategies and formats. Every artefact is run once, whoever asks."""

    def __init__(self, bench: Workbench, strategies: Sequence[str], formats: Sequence[str]) -> None:
        self.bench = bench
        replayed = partial(bench.replayed, bench.usable(bench.subject.batches))
        problems = [bench.problem(strategy, fmt) for strategy in strategies for fmt in formats]
        self.spaces = {problem.name: Modules(problem, replayed, bench.max_error) for problem in problems}
        self._ran: dict[tuple[str, Hashable], Plan] = {}

    def baselines(self) -> dict[str, Verification]:
        """The model with everything low, which is what it gives under plain autocast or a plain cast; known to the search."""
        low = self._run({name: space.low for name, space in self.spaces.items()})
        return {name: self._baseline(space, low[name]) for name, space in self.spaces.items()}

    def _baseline(self, space: Modules, plan: Plan) -> Verification:
        ran = plan.verification
        if ran is None or not runs(plan.format):  # the recorded graph stands in for a model that cannot be run
            return of_replay(self.bench, space.error(space.low), self.bench.policy(plan))
        fails = ran.measured_error is None or not all(one.holds for one in ran.criteria)
        space.log[space.key(space.low)] = (
            math.inf if fails else max(ran.measured_error or 0.0, ran.with_gradients or 0.0)
        )
        return ran

    def plans(self, baselines: Mapping[str, Verification]) -> dict[str, Plan]:
        """Every plan, verified on inputs it was not made from where there are any."""

        def holds(_: str, plan: Plan) -> bool:
            return plan.verified or not runs(plan.format)

        result = verified(self.spaces, self.bench.max_error, self._make, self._run, holds)
        for name, plan in self._run(dict(self._better(result, baselines))).items():
            harmful = is_outdone(result[name], baselines[name])
            if harmful or (gains(plan) and not is_outdone(plan, baselines[name])):
                result[name] = plan
        for name, space in self.spaces.items():
            tick(f"why {name.replace('_', ' ')}")
            plan = with_reasons(space, result[name], self.bench.findings)
            if runs(plan.format) and not has_low(plan):
                plan = replace(plan, reach=None if self.bench.options.quick else space.reach())
            result[name] = plan
        return {name: result[name] for name in self.spaces}

    def _make(self, name: str, limit: float) -> Candidate:
        tick(name.replace("_", " "))
        space = self.spaces[name]
        if self.bench.options.quick:
            return choose(space, limit, 0)
        result = choose(space, limit)
        return improve(space, result, limit)

    def _run(self, chosen: Mapping[str, Candidate]) -> dict[str, Plan]:
        """The plans of these choices, verified."""
        keys = {name: (name, self.spaces[name].key(point)) for name, point in chosen.items()}
        new = {n: as_plan(self.spaces[n].problem, p) for n, p in chosen.items() if keys[n] not in self._ran}
        self._ran |= {keys[name]: plan for name, plan in verify(self.bench, new).items()}
        return {name: self._ran[key] for name, key in keys.items()}

    def _better(
        self, plans: Mapping[str, Plan], baselines: Mapping[str, Verification]
    ) -> Iterator[tuple[str, Candidate]]:
        """What to run in the place of plans that do harm or gain nothing, or that another strategy's is better than.

        Everything low, or what another strategy keeps in the same format, where a replay holds; in the
        place of harm else FP32.
        """
        for name, space in self.spaces.items():
            own = plans[name]
            if self.bench.options.quick or not runs(own.format):
                continue
            harmful = is_outdone(own, baselines[name])
            rivals = [p for p in plans.values() if p.format == own.format and p.strategy != own.strategy and gains(p)]
            others = [] if harmful else [as_candidate(space.problem, rival) for rival in rivals]
            points = [*space.holding(), *others]
            bar = (1 - WORTH) * as_candidate(space.problem, own).cost if gains(own) and not harmful else math.inf
            cheaper = sorted((p for p in points if p.feasible and p.cost < bar), key=lambda point: point.price)
            held = (p for p in cheaper if space.error(p) <= (1 if p == space.low else MARGIN) * space.budget)
            if (point := next(held, space.nothing if harmful else None)) is not None:
                yield name, point
