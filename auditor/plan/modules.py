"""The search space of plans over modules: proposes choices by minimum cuts, replays them, and converts them to
plans."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..execution.policy import Policy, choice_keeping, plain
from ..numerics.formats import FORMATS
from ..records import Plan, ScopeChoice
from ..resources import table
from .problem import Problem
from .search import MOST_OFF, Candidate, Space

SHORTER = 0.05
"""Share by which a plan entirely in low precision, which is simpler, may exceed the best plan's time and cost."""

REPLAYS = 4
"""Maximum number of replays of the recorded graph for improving and explaining one choice of precisions."""


class Modules(Space):
    """All choices of module precisions for one problem. replayed: returns the error of the recorded graph under a
    policy; left: number of replays still allowed for improving and explaining a choice."""

    def __init__(self, problem: Problem, replayed: Callable[[Policy], float], budget: float) -> None:
        super().__init__()
        self.problem, self.budget, self._replayed = problem, budget, replayed
        self.nothing, self.low = problem.evaluate(problem.energy.scopes), problem.evaluate(())
        self.left = REPLAYS

    def replay(self, point: Candidate) -> float:
        """Output error of a replay of the recorded graph under a choice of precisions."""
        return self._replayed(self.problem.policy_for(choice_keeping(point.high, self.problem.format)))

    def before(self, point: Candidate) -> float:
        """Error of a choice of precisions: measured if its replay gave a finite error, otherwise predicted."""
        ran = self.log.get(point.high, math.inf)
        return ran if math.isfinite(ran) else point.predicted_error

    def after(self, before: Candidate, point: Candidate) -> float:
        """Predicted error of `point`, which lowers more modules than `before`; assumes that squared errors add up."""
        return math.sqrt(max(self.before(before) ** 2 + point.predicted_error**2 - before.predicted_error**2, 0.0))

    def holds(self, before: Candidate, point: Candidate, limit: float) -> bool:
        """Whether a replay of `point`, which has more in low precision than `before`, has an error within `limit`. No
        replay runs, and the result is False, if none is left or 1 / MOST_OFF of the predicted increase is too much."""
        known = self.before(before)
        if not (point.feasible and known + (self.after(before, point) - known) / MOST_OFF <= limit):
            return False
        if point.high not in self.log:
            if self.left <= 0:
                return False
            self.left -= 1
        return self.error(point) <= limit

    def within_budget(self) -> list[Candidate]:
        """[the choice of low precision everywhere], if it meets the budget without unsafe operations; otherwise []."""
        return [self.low] if self.low.feasible and self.error(self.low) <= self.budget else []

    def reach(self) -> float | None:
        """Smallest replayed error above 0; one replay lowers only the module with the smallest predicted error."""
        energy = self.problem.energy
        alone = (self.problem.evaluate(self.nothing.high.difference(energy.together(one))) for one in energy.scopes)
        gaining = [point for point in alone if point.cost < self.nothing.cost]
        if gaining:
            self.error(min(gaining, key=lambda point: point.predicted_error))
        return min((error for error in self.log.values() if 0 < error < math.inf), default=None)

    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice with a predicted error of at most `allowed`; or everything in low precision, if that
        meets the budget and exceeds the choice's time and cost by at most SHORTER."""
        low, point = self.low, self.problem.cheapest(allowed)
        near = low.seconds <= (1 + SHORTER) * point.seconds and low.cost <= (1 + SHORTER) * point.cost
        return low if near and self.within_budget() else point


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """Build the plan of a choice of precisions, with predicted errors and times, without a run."""
    fp32 = problem.evaluate(problem.energy.scopes).seconds
    resolution, row = problem.resolve(choice_keeping(chosen.high, problem.format)), FORMATS[problem.format]
    unfit = f"the {problem.device} has no {row.label} arithmetic: a speed-up only comes from moving fewer bytes"
    return Plan(
        name=problem.name,
        strategy=problem.strategy,
        format=problem.format,
        scopes=scopes_of(problem, chosen),
        predicted_error=chosen.predicted_error,
        low_precision_flops=chosen.low_flops,
        predicted_speedup=fp32 / chosen.seconds if chosen.seconds else 1.0,
        note="" if row.speed in table("plan/devices")[problem.device] else unfit,
        objective=problem.objective,
        target=problem.device,
        memory=problem.memory(resolution),
        fp32_memory=problem.memory(problem.resolve(plain("fp32"))),
    )


def scopes_of(problem: Problem, chosen: Candidate) -> dict[str, ScopeChoice]:
    """The plan's table of scopes: the root, every module whose precision differs from that of the module above it, and
    every low-precision module with functions in FP32."""
    return {
        path: ScopeChoice(
            boundary.precision,
            output="keep" if boundary.keeps else "cast",
            keep=tuple(sorted(boundary.keep)),
            fp32_output=tuple(sorted(boundary.fp32_output)),
        )
        for path, boundary in problem.policy_for(choice_keeping(chosen.high, problem.format)).wrapped.items()
    }
