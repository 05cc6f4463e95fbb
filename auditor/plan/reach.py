"""Plans that run nothing low: the smallest error that a run with anything low has, so that users know which budget would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..numerics.formats import runs
from ..records import Baseline, Plan
from .modules import Modules
from .problem import Problem
from .recommend import has_low
from .solve import Candidate, evaluate
from .workbench import Workbench


def with_reach(bench: Workbench, plans: Mapping[str, Plan], baselines: Mapping[str, Baseline]) -> dict[str, Plan]:
    """The plans, those that run nothing low with the smallest error within reach."""
    found = dict(plans)
    for name, plan in plans.items():
        if runs(plan.format) and plan.program is None and not has_low(plan):
            found[name] = replace(
                plan, reach=_reach(bench, bench.problem(plan.strategy, plan.format), baselines.get(name))
            )
    return found


def _reach(bench: Workbench, problem: Problem, baseline: Baseline | None) -> float | None:
    """The smaller error of two runs: the one module low that is predicted to do least harm, and everything low."""
    errors = [] if baseline is None or baseline.measured_error is None else [baseline.measured_error]
    least = None if bench.quick else _least_harm(problem)
    if least is not None:
        trial = bench.trial(bench.usable(bench.checks) or bench.usable(bench.subject.batches))
        errors.append(Modules(problem, trial, bench.max_error).error(least))
    return min(filter(math.isfinite, errors), default=None)


def _least_harm(problem: Problem) -> Candidate | None:
    """One module low, of those that gain by it the one whose operations move the outputs least; None where none gains."""
    energy = problem.energy
    high = evaluate(problem, dict.fromkeys(energy.scopes, "fp32"))
    harm: list[tuple[float, str, Candidate]] = []
    for owner in energy.scopes:
        low = {owner, *energy.tied_to(owner)}
        labels = {other: problem.format if other in low else "fp32" for other in energy.scopes}
        point = evaluate(problem, energy.settled(labels))
        if point.cost < high.cost:
            harm.append((_moves(problem, low), owner, point))
    return min(harm, default=(0.0, "", None), key=lambda each: each[:2])[2]


def _moves(problem: Problem, owners: set[str]) -> float:
    """How far their operations move the outputs, together."""
    names = [node.name for owner in owners for node in problem.operations_of.get(owner, ())]
    return math.fsum(problem.contributions[name].isolated ** 2 for name in names if name in problem.contributions)
