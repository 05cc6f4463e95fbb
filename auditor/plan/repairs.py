"""Predicts what the model gains if a problem in its source is repaired: the plan without that problem's errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from ..artefact.strategies import strategy_of
from ..execution.mixtures import Mixture, find_mixtures
from ..execution.policy import plain
from ..numerics.formats import runs
from ..numerics.operations import operation
from ..records import Contribution, Finding, Plan, Repair, Verdict
from ..records.measure import FAILURES
from ..records.paths import module_of
from ..rulebook.failures import OTHERS
from ..rulebook.mixed import changes_where_made, writes_into_fp32
from .context import PlanningContext
from .costs import Cost
from .problem import Problem
from .search import MARGIN, MOST_OFF, Candidate

MOST_CAUSES = 8
"""Maximum number of causes whose repair is predicted: those whose operations take the most FP32 time first."""

LEAST_GAIN = 1.01
"""Smallest speed-up over the recommended plan for which a repair is worth mentioning."""


@dataclass(frozen=True)
class _Start:
    """A plan, its optimization problem without repairs, and the largest predicted error that a repaired plan may have."""

    plan: Plan
    problem: Problem
    allowed: float

    @cached_property
    def unrepaired(self) -> float:
        """Predicted speed-up without any repair."""
        return _speedup(self.problem, _cheapest(self.problem, self.allowed))

    @property
    def fastest(self) -> float:
        """Predicted speed-up with every operation in its cheapest format, which no repair exceeds."""
        whole = self.problem.evaluate(self.problem.energy.scopes).seconds
        return whole / self.problem.least if self.problem.least else 1.0


def predict_repairs(
    planning: PlanningContext, plans: Mapping[str, Plan], recommended: str | None, findings: Sequence[Finding]
) -> tuple[Repair, ...]:
    """Predict the fastest plan after the repair of each cause of findings, and of the fewest causes that gain the most.

    Only repairs that gain at least LEAST_GAIN over the recommended plan are returned, the largest gain first. Notes
    are no problems, and are not repaired. The result is empty if the plans do not minimize time, or if the recommended
    plan is an exported program.
    """
    chosen = plans.get(recommended or "")
    if chosen is not None and (chosen.objective != "time" or chosen.program is not None):
        return ()
    causes = _causes(findings)
    rewrites = _Rewrites.of(planning, findings)
    if not causes:
        return ()
    before = chosen.predicted_speedup if chosen is not None else 1.0
    starts = [start for start in _starts(planning, plans) if start.fastest >= LEAST_GAIN * before]
    if not starts:
        return ()
    first = starts[0].problem
    causes = dict(sorted(causes.items(), key=lambda pair: -_fp32_seconds(first, pair[1].names))[:MOST_CAUSES])

    def repair(*group: str) -> Repair:
        return _best(starts, group, _Cause.joined(causes[cause] for cause in group), before, rewrites)

    repairs = [repair(cause) for cause in causes]
    joint = repair(*causes)
    if joint.gain >= LEAST_GAIN * max(one.gain for one in repairs):
        repairs.append(_fewest(joint, repair))
    gaining = [one for one in repairs if one.gain >= LEAST_GAIN]
    return tuple(sorted(gaining, key=lambda one: (-one.gain, len(one.causes))))


def _fewest(joint: Repair, repair: Callable[..., Repair]) -> Repair:
    """The joint repair without the causes that it can do without, the last cause first."""
    for cause in reversed(joint.causes):
        rest = [other for other in joint.causes if other != cause]
        if rest and LEAST_GAIN * (smaller := repair(*rest)).gain >= joint.gain:
            joint = smaller
    return joint


def _starts(planning: PlanningContext, plans: Mapping[str, Plan]) -> Iterator[_Start]:
    """The plans for the live model that torch can run, if their strategy serves the use that was asked for."""
    for plan in plans.values():
        is_for_live_model = plan.program is None and runs(plan.format)
        serves_use = strategy_of(plan.strategy).trains or planning.options.use != "training"
        if is_for_live_model and serves_use:
            problem = planning.problem(plan.strategy, plan.format)
            yield _Start(plan, problem, _allowed(plan, planning.max_error))


def _allowed(plan: Plan, budget: float) -> float:
    """The predicted error that corresponds to the budget, by the plan's own ratio of measurement and prediction."""
    measured, predicted = plan.measured_error, plan.predicted_error
    if not plan.has_low or not measured or not predicted:
        return MARGIN * budget
    correction = min(max(measured / predicted, 1 / MOST_OFF), MOST_OFF)
    return max(MARGIN * budget / correction, predicted)


@dataclass(frozen=True)
class _Cause:
    """The operations of one or more causes of findings. inexact: those that a repair makes exact; mixed: those that get
    two dtypes and raise; made: those of `mixed` whose fix makes the FP32 values in low precision from the start."""

    inexact: frozenset[str] = frozenset()
    mixed: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All operations."""
        return self.inexact | self.mixed

    @classmethod
    def of(cls, finding: Finding) -> _Cause:
        """The operations of one finding."""
        operations = frozenset({finding.node, *finding.evidence.get(OTHERS, ())})
        if "dtype_fix" not in finding.evidence:
            return cls(inexact=operations)
        is_made = changes_where_made(str(finding.evidence["dtype_fix"]))
        return cls(mixed=operations, made=operations if is_made else frozenset())

    @classmethod
    def joined(cls, causes: Iterable[_Cause]) -> _Cause:
        """The operations of several causes."""
        result = cls()
        for cause in causes:
            inexact = result.inexact | cause.inexact
            mixed = result.mixed | cause.mixed
            result = cls(inexact, mixed, result.made | cause.made)
        return result


def _causes(findings: Sequence[Finding]) -> dict[str, _Cause]:
    """{cause: its operations}, of problems: errors and warnings about precision, or about dtypes that make a run raise."""
    result: dict[str, _Cause] = {}
    for finding in findings:
        is_repairable = finding.measurable or finding.rule.startswith(FAILURES)
        if finding.node and finding.severity != "info" and is_repairable:
            known = result.get(finding.cause, _Cause())
            result[finding.cause] = _Cause.joined((known, _Cause.of(finding)))
    return result


def _fp32_seconds(problem: Problem, names: Collection[str]) -> float:
    """Predicted FP32 time of all modules that contain the operations."""
    owners = {problem.capture.nodes[name].owner for name in names if name in problem.capture.nodes}
    return sum(high for owner in owners for _, high, _ in [problem.energy.scopes[owner]])


def _best(
    starts: Sequence[_Start], causes: tuple[str, ...], cause: _Cause, before: float, rewrites: _Rewrites
) -> Repair:
    """The fastest plan of all strategies and formats after the repair of a cause, or of several at once.

    A plan that is predicted to be as fast without the repair gains nothing by it: runs have refuted that prediction.
    """
    repairs = []
    for start in starts:
        for problem in _ways(start.problem, cause, rewrites):
            point = _cheapest(problem, start.allowed)
            speedup = _speedup(problem, point)
            if speedup < LEAST_GAIN * start.unrepaired:
                speedup = min(speedup, before)
            kept = {module_of(path) for path in point.high} if point.high else set()
            repairs.append(Repair(causes, start.plan.name, speedup, before, len(kept)))
    return max(repairs, key=attrgetter("speedup"))


def _cheapest(problem: Problem, allowed: float) -> Candidate:
    """The fastest choice of precisions within a predicted error."""
    point = problem.cheapest(allowed)
    low = problem.evaluate(())
    # As in a search, everything in low precision may use the whole budget.
    return low if low.predicted_error <= allowed / MARGIN and low.seconds <= point.seconds else point


def _ways(problem: Problem, cause: _Cause, rewrites: _Rewrites) -> Iterator[Problem]:
    """The problem after a repair: where operands had two dtypes, with FP32 values converted where they meet low-precision
    ones, or, if that is the fix, made in low precision from the start."""
    mixtures = _mixtures(problem, cause.names)
    graph = {node.name: node for node in problem.capture.graph_module.graph.nodes}
    in_fp32 = {name for name, one in mixtures.items() if name not in cause.made and writes_into_fp32(graph[name], one)}
    converted = {
        name: one if name in cause.made else replace(one, chain=())  # only what the operation itself reads
        for name, one in mixtures.items()
        if name not in in_fp32
    }
    after = repaired(problem, {*cause.inexact, *in_fp32}, rewrites, converted)
    yield after
    made = frozenset(name for reader, one in mixtures.items() if reader in cause.made for name in one.written)
    if made:
        left_out = {name: Cost(0, 0, True) for name in made if operation(problem.capture.nodes[name].op).cast}
        yield replace(after, made_low=made, costs={**after.costs, **left_out})


def _speedup(problem: Problem, point: Candidate) -> float:
    """Predicted speed-up of a choice of precisions over everything in FP32."""
    return problem.evaluate(problem.energy.scopes).seconds / point.seconds if point.seconds else 1.0


@dataclass(frozen=True)
class _Rewrites:
    """Operations with a finding of a rule whose `[[fix]]` rewrites the algebra: these stay in low precision. joined: those
    that one operation replaces together."""

    low: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()

    @classmethod
    def of(cls, planning: PlanningContext, findings: Sequence[Finding]) -> _Rewrites:
        """The operations among findings."""
        rewriting, joining = set[str](), set[str]()  # codes of rules
        for rule in planning.options.rulebook:
            offered = [fix for fix in rule.fixes if fix.safety != "display"]
            if offered:
                rewriting.add(rule.code)
            if any(fix.joins for fix in offered):
                joining.add(rule.code)
        low = frozenset(one.node for one in findings if one.rule in rewriting)
        joined = frozenset(one.node for one in findings if one.rule in joining)
        return cls(low, joined)


def repaired(problem: Problem, names: Collection[str], rewrites: _Rewrites, mixtures: Mapping[str, Mixture]) -> Problem:
    """The problem as it is after a repair of the operations `names`: they are safe, add no error, and accept two dtypes.

    The same holds for the operations that follow and only fail on the range of their values. A repaired operation still
    computes in FP32, so that its inputs and its result are converted, unless `rewrites` names it. Rounding of the values
    that it reads still counts, unless they turn Inf or NaN. mixtures: where an operation raises for its inputs' dtypes; the
    FP32 values among them are converted.
    """
    lowered = frozenset(value for one in mixtures.values() for value in (*one.chain, *one.wide))
    own = _until_small_again(problem, set(names) - mixtures.keys())
    safe = {name: Verdict("safe", "repaired in the source") for name in own}
    read = {source for name in own for source in problem.capture.nodes[name].inputs}
    only = {source for source in read if set(problem.users.get(source, ())) <= own}

    def without_errors(name: str, known: Contribution) -> Contribution:
        if name in own:
            known = replace(known, own=0.0)
        return replace(known, cast=0.0) if name in only and not math.isfinite(known.cast) else known

    contributions = {
        fmt: {name: without_errors(name, known) for name, known in each.items()}
        for fmt, each in problem.contributions.items()
    }
    stays_low = own if not rewrites.low.isdisjoint(names) else frozenset[str]()
    joined = own if not rewrites.joined.isdisjoint(names) else frozenset[str]()
    return replace(
        problem,
        costs={**problem.costs, **_costs_of_joined(problem, joined)},
        contributions=contributions,
        verdicts={**problem.verdicts, **safe},
        repaired=own,
        lowered=lowered,
        rewritten=stays_low,
    )


def _costs_of_joined(problem: Problem, joined: Set[str]) -> dict[str, Cost]:
    """{operation: its Cost}, of operations that become one: values that pass between them are neither stored nor read."""
    result = {}
    for name in joined:
        users = problem.users.get(name, ())
        values = [source for source in problem.capture.nodes[name].inputs if source not in joined]
        if not users or not joined >= set(users):
            values.append(name)
        elements = sum(problem.elements.get(value, 0) for value in values)
        result[name] = replace(problem.costs[name], elements=elements)
    return result


def _mixtures(problem: Problem, names: Collection[str]) -> dict[str, Mixture]:
    """{operation among `names` that gets two dtypes, and raises, with everything in low precision: the Mixture}."""
    low = plain(problem.format)
    mixtures = find_mixtures(problem.policy_for(low), problem.resolve(low))
    return {name: mixtures[name] for name in names if name in mixtures}


def _until_small_again(problem: Problem, names: Collection[str]) -> frozenset[str]:
    """The operations `names`, and those that read their results and are unsafe by the range of their values."""
    result = {name for name in names if name in problem.capture.nodes}
    for name, node in problem.capture.nodes.items():  # in execution order
        verdict = problem.verdicts.get(name)
        if verdict is not None and verdict.verdict == "unsafe" and verdict.limited_by == "range":
            result |= {name} if result.intersection(node.inputs) else set()
    return frozenset(result)
