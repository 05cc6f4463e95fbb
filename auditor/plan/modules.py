"""The search space of plans over modules: proposes choices by minimum cuts, replays them, and converts them to
plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from ..execution.policy import Policy, PrecisionChoice, choice_keeping, plain
from ..numerics.formats import FORMATS
from ..records import Plan, ScopeChoice
from ..records.paths import FP32_OUTPUT
from ..resources import table
from .costs import cast_seconds
from .outputs import outputs_of, without_effect
from .problem import Problem
from .search import FORBIDDEN, MOST_OFF, Candidate, Space

VISITS = 20_000
"""Maximum number of operations that one search visits in total, which bounds the time for a large model."""

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
        self.nothing, self.low = evaluate(problem, problem.energy.scopes), evaluate(problem, ())
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
        alone = (evaluate(self.problem, self.nothing.high.difference(energy.together(one))) for one in energy.scopes)
        gaining = [point for point in alone if point.cost < self.nothing.cost]
        if gaining:
            self.error(min(gaining, key=lambda point: point.predicted_error))
        return min((error for error in self.log.values() if 0 < error < math.inf), default=None)

    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice with a predicted error of at most `allowed`; or everything in low precision, if that
        meets the budget and exceeds the choice's time and cost by at most SHORTER."""
        low, energy, holds = self.low, self.problem.energy, bool(self.within_budget())

        def wins(point: Candidate) -> bool:
            return low.seconds <= (1 + SHORTER) * point.seconds and low.cost <= (1 + SHORTER) * point.cost

        if holds and wins(evaluate(self.problem, energy.cuts.best(0.0) & energy.scopes.keys())):  # without a search
            return low
        point = cheapest(self.problem, allowed)
        return low if holds and wins(point) else point


def as_candidate(problem: Problem, chosen: PrecisionChoice) -> Candidate:
    """The Candidate of a PrecisionChoice; modules that share a weight with an FP32 module become FP32 too."""
    high = (owner for owner in problem.energy.scopes if chosen(owner) == "fp32")
    return evaluate(problem, outputs_of(chosen).union(each for x in high for each in problem.energy.together(x)))


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """Build the plan of a choice of precisions, with predicted errors and times, without a run."""
    fp32 = evaluate(problem, problem.energy.scopes).seconds
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
        raised=problem.raised,
        stored_low=problem.stored_low,
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


def cheapest(problem: Problem, allowed: float) -> Candidate:
    """The cheapest choice found with a predicted error of at most `allowed`."""
    energy, most = problem.energy, min(allowed, math.sqrt(FORBIDDEN) / 2)
    tries = VISITS // max(len(problem.capture.nodes), 1)
    return energy.cuts.cheapest(lambda high: evaluate(problem, high & energy.scopes.keys()), most, energy.groups, tries)


def evaluate(problem: Problem, high: Collection[str]) -> Candidate:
    """Predict error, time and low-precision share of FLOPs of a choice; cached. high: modules and functions in FP32.

    If batches take several paths through the model, the error is the largest of any path.
    """
    settled, known, costs = problem.energy.settle(high), problem.evaluated, problem.costs
    high = settled - without_effect(settled)
    if high in known:
        return known[high]
    resolution = problem.resolve(choice_keeping(high, problem.format))
    own, took, low_flops, stored = problem.figures(resolution)
    squares = problem.squares(resolution, own)
    # Autocast caches cast weights, so only casts of activations take time.
    cast = costs.keys() & {source for typed in resolution.nodes.values() for source in typed.cast}
    elapsed = cast_seconds(sum(problem.elements[name] for name in cast), problem.format, problem.device)
    elapsed += float(took.sum())
    cost = problem.price(resolution, elapsed, float(stored.sum()))
    # changes of precision: scopes that differ from the scope above, and products with FP32 output
    changes = sum((owner in high) != (above in high) for owner, above in problem.energy.tree.items())
    changes += sum(path.endswith(FP32_OUTPUT) for path in high)
    error = math.sqrt(max(sum(square for name, square in squares.items() if name in path) for path in problem.paths))
    share = float(low_flops.sum()) / max(sum(cost.flops for cost in costs.values()), 1)
    known[high] = Candidate(high, error, cost + problem.island * changes, cost, elapsed, share)
    return known[high]
