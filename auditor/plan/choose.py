"""From the Pareto curve to one plan: the fastest point that holds when the graph is run under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..formats.table import FORMATS
from ..ops.kernels import UnsupportedInFormat
from ..raised import let_through
from ..records import Finding, Plan, ScopeChoice
from ..replay.chosen import labelled, scoped
from ..replay.nesting import boundaries
from ..replay.strategies import plain
from ..resources import table
from .costs import heavy
from .energy import FORBIDDEN
from .exceptions import needed
from .islands import savings
from .memory import memory_of
from .problem import Problem
from .refine import refined
from .solve import Candidate, between, candidates, evaluate
from .trial import Trial

MARGIN = 0.8
"""Share of the budget a plan may use on the inputs it is made from: other inputs deserve some room."""


SHORTER = 0.05
"""Share of the predicted time that a plan without any FP32 may take longer than the fastest: it is easier to live with,
and no prediction is as good as that."""


LITTLE = 0.01
"""Share of what a plan takes that no search is begun for."""

FAR = 1.15
"""How many times the budget a point may be expected to take, by what runs beside it were off, and is run all the same."""

MOST_OFF = 4.0
"""How many times as large, or as small, runs are taken to be as predicted, at most."""

REFINED = 3
"""Times the search around a plan is begun again for less error, where a run of what it found is beyond the budget."""

FORETOLD = 4
"""Runs, at most, of what is predicted to hold, where runs are dear: each says by how much predictions of the next are off."""

STRICTER = 0.95
"""Share of what a run says would hold that is tried next, where that run did not hold."""


def make_plan(problem: Problem, trial: Trial, budget: float, all_low: float | None = None) -> Plan:
    """The fastest candidate whose simulated error stays within `budget`; everything low where that holds and takes as long.

    Candidates run from everything low to everything FP32, so a bisection needs few runs; the last one always holds.
    all_low: error of a run with everything low, where there was one.
    """
    curve = candidates(problem)
    low, runs = _everything(problem, problem.format), Runs(dear=heavy(problem.costs))
    runs.learn(low, math.inf if all_low is None else all_low)
    chosen = _fastest_that_holds(problem, curve, trial, budget, runs)
    hopeless = all_low is not None and all_low > budget / MARGIN
    if chosen.precision != low.precision and _about_as_fast(low, chosen) and _allowed(low) and not hopeless:
        chosen = low if simulated_error(problem, low, trial, budget) <= budget else chosen
    return _plan(problem, chosen, curve)


def predicted_plan(problem: Problem, budget: float) -> Plan:
    """The fastest candidate that is predicted to stay within `budget`: nothing is run."""
    curve = candidates(problem)
    return _plan(
        problem, next(point for point in curve if point is curve[-1] or point.predicted_error <= budget), curve
    )


def plain_will_do(problem: Problem, budget: float) -> bool:
    """Whether everything low is safe, takes about as long as the fastest choice, and is predicted to stay within `budget`."""
    low = _everything(problem, problem.format)
    return _allowed(low) and low.predicted_error <= budget and _about_as_fast(low, candidates(problem)[0])


def _about_as_fast(low: Candidate, other: Candidate) -> bool:
    return low.seconds <= (1 + SHORTER) * other.seconds and low.cost <= (1 + SHORTER) * other.cost


def plain_plan(problem: Problem) -> Plan:
    """Everything low: what `torch.autocast` around the model, or a cast of all of it, comes to."""
    return as_plan(problem, _everything(problem, problem.format))


def fp32_plan(problem: Problem) -> Plan:
    """Nothing low: where every other plan would do harm."""
    return as_plan(problem, _everything(problem, "fp32"))


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """A choice that was not found on the curve, as a plan."""
    return _plan(problem, chosen, candidates(problem))


def _everything(problem: Problem, precision: str) -> Candidate:
    return evaluate(problem, dict.fromkeys(problem.energy.scopes, precision))


def ruled(problem: Problem, findings: Sequence[Finding]) -> Candidate:
    """FP32 in every scope where a rule declares an error or a warning, whatever the measurement says; low elsewhere."""
    fired = {
        finding.owner
        for finding in findings
        if problem.format in finding.formats and (finding.declared or finding.severity) != "info"
    }
    energy = problem.energy
    kept = {other for owner in fired for other in (owner, *energy.tied_to(owner))}
    labels = {owner: "fp32" if owner in kept else problem.format for owner in energy.scopes}
    return evaluate(problem, energy.settled(labels))


def accepted(problem: Problem, trial: Trial) -> Candidate | None:
    """Everything low but the scopes with an unsafe operation or one that refuses to run; None where that does not run."""
    nodes, energy = problem.capture.nodes, problem.energy
    kept = {node.owner for name, node in nodes.items() if problem.verdicts[name].verdict == "unsafe"}
    while True:
        kept |= {other for owner in kept & energy.scopes.keys() for other in energy.tied_to(owner)}
        labels = {owner: "fp32" if owner in kept else problem.format for owner in energy.scopes}
        found = evaluate(problem, energy.settled(labels))
        try:
            trial.error(problem.running(_precision_in(found)))
            return found
        except UnsupportedInFormat as refused:
            if refused.owner is None or found.precision.get(refused.owner, "fp32") == "fp32":
                return None
            kept.add(refused.owner)
        except Exception as error:
            let_through(error)
            return None


def lowers_unsafe(problem: Problem, plan: Plan) -> bool:
    """Whether the plan runs something low that is unsafe: that one run happens to hold does not make it safe."""
    return not _allowed(evaluate(problem, {owner: scoped(plan.scopes)(owner) for owner in problem.energy.scopes}))


def _plan(problem: Problem, chosen: Candidate, curve: Sequence[Candidate]) -> Plan:
    slowest = max(curve, key=lambda point: point.seconds).seconds
    chosen = evaluate(problem, needed(problem, chosen.precision))
    return Plan(
        name=problem.name,
        strategy=problem.strategy,
        format=problem.format,
        scopes=scopes_of(problem, chosen),
        predicted_error=chosen.predicted_error,
        low_precision_flops=chosen.low_flops,
        predicted_speedup=slowest / chosen.seconds if chosen.seconds else 1.0,
        note=_unfit(problem),
        raised=problem.raised,
        stored_low=problem.stored_low,
        objective=problem.objective,
        target=problem.device,
        memory=memory_of(problem.capture, problem.costs, problem.resolve(_precision_in(chosen)), problem.format),
        fp32_memory=memory_of(problem.capture, problem.costs, problem.resolve(plain("fp32")), problem.format),
        pareto=tuple((point.predicted_error, point.seconds / slowest if slowest else 1.0) for point in curve),
    )


@dataclass
class Runs:
    """What runs said of predictions. off: how many times the predicted error the last one that was finite had.

    dear: whether a run costs more than what little it may gain.
    """

    off: float = 1.0
    dear: bool = True

    def learn(self, point: Candidate, error: float) -> None:
        """Take in the error of a run."""
        if math.isfinite(error) and point.predicted_error:
            self.off = min(max(error / point.predicted_error, 1 / MOST_OFF), MOST_OFF)

    def expected(self, point: Candidate) -> float:
        """The error that a run of this will have, should it be off by as much."""
        return self.off * point.predicted_error


def _fastest_that_holds(
    problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float, runs: Runs | None = None
) -> Candidate:
    """First over the curve, then between the last point that fails and the first that holds, then around what is found.

    Where runs are dear, the first two go by predictions, as long as a run bears them out.
    """
    runs = runs or Runs()
    foretold = _foretold(problem, curve, trial, budget, runs) if runs.dear else None
    chosen = _bisected(problem, curve, trial, budget, runs) if foretold is None else foretold
    if not _worth_a_search(chosen, curve[0]):
        return chosen
    allowed = max(budget / max(runs.off, 1.0) if runs.dear else budget, chosen.predicted_error)
    for _ in range(REFINED):
        better = refined(problem, chosen, allowed)
        if better.price >= chosen.price:
            break
        error = simulated_error(problem, better, trial, budget)
        if error <= budget:
            return better
        allowed *= STRICTER * budget / error
    return chosen


def _bisected(problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float, runs: Runs) -> Candidate:
    found = _bisect(problem, curve, trial, budget, runs)
    if not _worth_a_search(curve[found], curve[max(found - 1, 0)]):
        return curve[found]
    finer = between(problem, curve[found - 1], curve[found])
    return finer[_bisect(problem, finer, trial, budget, runs)]


def _foretold(
    problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float, runs: Runs
) -> Candidate | None:
    """Of the curve and of what lies between its points, the first that is predicted to hold, by what runs were off, and
    does in a run; None where none of a few does."""
    for _ in range(FORETOLD):
        limit = min(budget / runs.off, math.sqrt(FORBIDDEN) / 2)
        index = next((i for i, point in enumerate(curve) if point.predicted_error <= limit), len(curve) - 1)
        point = curve[index]
        if index and _worth_a_search(point, curve[index - 1]):
            finer = between(problem, curve[index - 1], point)
            point = next(other for other in finer if other is point or other.predicted_error <= limit)
        error = math.inf if point is curve[-1] else simulated_error(problem, point, trial, budget)
        runs.learn(point, error)
        if error <= budget:
            return point
        if not math.isfinite(error):
            break
        runs.off /= STRICTER
    return None


def _worth_a_search(chosen: Candidate, best: Candidate) -> bool:
    """Whether the best that a search could find takes less by as much as is worth one."""
    return best.price < (1 - LITTLE) * chosen.price


def _bisect(problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float, runs: Runs | None = None) -> int:
    """Index of the first point that holds; begun where the prediction puts it. The last one is known to hold.

    Where runs are dear, what takes hardly less than one that holds, and what is expected to be over the budget by far
    beside one, is not run.
    """
    fails, holds, runs = -1, len(curve) - 1, runs or Runs()
    probe = min(_expected_to_hold(curve, fails, holds, budget, runs), holds - 1)
    while holds - fails > 1:
        error = simulated_error(problem, curve[probe], trial, budget) if _allowed(curve[probe]) else math.inf
        runs.learn(curve[probe], error)
        if error <= budget:
            holds = probe
            if not any(_worth_running(point, curve[holds], budget, runs) for point in curve[fails + 1 : holds]):
                break
            probe = min(_expected_to_hold(curve, fails, holds, budget, runs), holds - 1)
        else:
            fails = probe
            guess = (probe + holds + 1) // 2
            if math.isfinite(error):
                guess = min(_expected_to_hold(curve, fails, holds, budget, runs), holds - 1)
            probe = guess if fails < guess < holds else (fails + holds) // 2
    return holds


def _expected_to_hold(curve: Sequence[Candidate], fails: int, holds: int, budget: float, runs: Runs) -> int:
    """The first point between the two that is; the second one where none is."""
    between = range(fails + 1, holds)
    return next((i for i in between if runs.expected(curve[i]) <= budget), holds)


def _worth_running(point: Candidate, holds: Candidate, budget: float, runs: Runs) -> bool:
    """Whether a point may hold too, and be better than one that does."""
    return not runs.dear or (_worth_a_search(holds, point) and runs.expected(point) <= FAR * budget)


def _allowed(point: Candidate) -> bool:
    """Whether no unsafe node runs low: that one run happens to hold does not make it safe."""
    return point.predicted_error < math.sqrt(FORBIDDEN)


def simulated_error(problem: Problem, candidate: Candidate, trial: Trial, enough: float = math.inf) -> float:
    """Error of the captured graph, every node run as the candidate's precisions ask; inf where an operation raises.

    enough: once a batch is beyond it, the others are left out.
    """
    try:
        return trial.error(problem.running(_precision_in(candidate)), enough)
    except Exception as error:
        let_through(error)
        return float("inf")


def _unfit(problem: Problem) -> str:
    """A word on devices without arithmetic in the format."""
    row = FORMATS[problem.format]
    if row.speed in table("plan/devices")[problem.device]:
        return ""
    return f"the {problem.device} has no {row.label} arithmetic: its speed-up is that of moving fewer bytes"


def _precision_in(candidate: Candidate) -> Callable[[str], str]:
    return labelled(candidate.precision)


def scopes_of(problem: Problem, chosen: Candidate) -> dict[str, ScopeChoice]:
    """The table of scopes: the root, and every module whose precision differs from that of the module above it."""
    saved = savings(problem, chosen)
    wrapped = boundaries(problem.capture, problem.strategy, _precision_in(chosen))
    return {
        path: ScopeChoice(
            boundary.precision,
            output="keep" if boundary.keeps else "cast",
            cost=saved.get(path) if boundary.precision == "fp32" else None,
            keep=tuple(sorted(boundary.keep)),
        )
        for path, boundary in wrapped.items()
    }
