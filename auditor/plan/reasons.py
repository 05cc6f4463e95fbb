"""Why every module that stays FP32 under a plan does: what forbids it, or what lowering it alone would add and save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..execution.chosen import labelled
from ..execution.resolve import Resolution
from ..paths import function_in, module_of, of_function
from ..records import Finding, Plan, Reason
from .choices import as_candidate
from .clauses import ALONE, close, little, no_gain, operation_reasons, over, together
from .energy import FORBIDDEN
from .modules import Modules
from .problem import Problem
from .search import MARGIN, MOST_OFF, WORTH
from .solve import Candidate, evaluate

VISITS = 60_000
"""Operations looked at, over all modules that are lowered in thought: the rest is estimated from the terms of the cut."""

RUNS, FEW_RUNS = 24, 4
"""Modules that are lowered in a run of the recorded graph, at most, and however much a run takes; what the others add is predicted,
and said to be."""

RUN_VISITS, RUN_FLOPS = 12_000, 50e9
"""Operations, and floating-point operations, in all of these runs."""

SHARES = 4
"""Different shares of time that modules may save without being worth it, each in a clause of its own."""

FAR = 1.15
"""How many times the budget a choice may be expected to take, by what runs beside it were off, and is run all the same."""


@dataclass(frozen=True)
class Lowered:
    """One module lowered in thought, with those that must go along. point: None where it is only estimated."""

    owner: str
    group: tuple[str, ...]
    point: Candidate | None
    saves: float
    predicted: float
    gains: bool


class Weighed:
    """A choice, and every module in FP32 and every function that a low one keeps so, lowered by itself: what forbids that, or what
    a replay says that it adds.

    before: the error of the choice's replay.
    """

    def __init__(self, space: Modules, chosen: Candidate) -> None:
        self._space, self._problem, self._chosen = space, space.problem, chosen
        mixed = len(set(chosen.precision.values())) > 1
        before = space.error(chosen) if mixed else 0.0
        self._before = before if math.isfinite(before) else chosen.predicted_error
        self._kept = _kept(self._problem, chosen)
        self._forbidden: dict[str, Reason] = {}
        self._open: list[Lowered] = []
        now = self._problem.resolve(labelled(chosen.precision))
        tries = VISITS // max(len(self._problem.capture.nodes), 1)
        for owner in sorted(self._kept, key=lambda owner: (-_own_saving(self._problem, owner), owner)):
            reason = _without_operations(self._problem, owner)
            if reason is None and tries > 0:
                tries -= 1
                reason = _forbidden(self._problem, chosen, now, owner)
            if reason is not None:
                self._forbidden[owner] = reason
            elif tries > 0:
                self._open.append(_lowered(self._problem, chosen, owner))
            else:
                self._open.append(_estimated(self._problem, chosen, owner))

    def improved(self) -> Candidate:
        """The choice with what gains low as well, one module after the other, as long as replays stay within the share of the
        budget that a plan uses."""
        found, target, left = self._chosen, MARGIN * self._space.budget, self._most
        for each in self._open:
            if left and each.gains and each.owner == module_of(each.owner) and self._may_add(each, target):
                point = self._lowering(found, each.owner)
                if point.feasible and point.price < (1 - WORTH) * found.price:
                    left -= 1
                    found = point if self._space.error(point) <= target else found
        return found

    def _may_add(self, each: Lowered, target: float) -> bool:
        """Whether the error may stay within the target, should predictions be off by as much as they are at most."""
        return self._before + self._adds(each.predicted) / MOST_OFF <= target

    def _lowering(self, point: Candidate, owner: str) -> Candidate:
        group = dict.fromkeys(lowered_with(self._problem, owner), self._problem.format)
        return evaluate(self._problem, self._problem.energy.settled({**point.precision, **group}))

    @property
    def _most(self) -> int:
        """How many modules are lowered in runs."""
        costs = self._problem.costs
        flops = sum(cost.flops for cost in costs.values())
        affordable = min(RUN_VISITS / max(len(costs), 1), RUN_FLOPS / max(flops, 1))
        return min(RUNS, max(int(affordable), FEW_RUNS))

    @cached_property
    def _idle_hold(self) -> bool:
        """Whether all that gains nothing can be low together."""
        idle = [each.owner for each in self._open if not each.gains]
        return not idle or self._holds(_all_low(self._problem, self._chosen, idle))

    def _holds(self, point: Candidate) -> bool:
        """Whether a choice holds the budget in a run; none is made where it lowers what is unsafe, or would be over the budget
        by far, should it be off by as much as the choice was."""
        off = self._before / self._chosen.predicted_error if self._chosen.predicted_error else 1.0
        expected = min(max(off, 1 / MOST_OFF), MOST_OFF) * point.predicted_error
        budget = self._space.budget
        return point.feasible and expected <= FAR * budget and self._space.error(point) <= budget

    def _ran(self) -> dict[str, float]:
        """Errors with one module lowered, of those that are run: what gains most first."""
        found, left = dict[str, float](), self._most - self._space.replays
        for each in self._open:
            if each.point is None:
                continue
            asked = left > 0 and (each.gains or not self._idle_hold)
            left -= asked
            if asked or (each.gains and self._space.is_logged(each.point)):
                found[each.owner] = self._space.error(each.point)
        return found

    def reasons(self) -> tuple[Reason, ...]:
        """One for every module and function, those alike together."""
        ran, found = self._ran(), dict(self._forbidden)
        for each in self._open:
            found[each.owner] = self._reason(each, ran.get(each.owner))
        kept = [replace(found[owner], modules=(owner,)) for owner in self._kept]
        return together(_briefly(kept, self._problem.objective))

    def least(self, reasons: Iterable[Reason]) -> tuple[str, ...]:
        """Modules without which in FP32 the budget is known to hold, all others low: those that a run says so of.

        From what the plan keeps, all that gains nothing is lowered; where that does not hold together, one after the other as
        long as the prediction allows it; and where a run does not bear that out, nothing.
        """
        problem, chosen = self._problem, self._chosen
        idle = [owner for reason in reasons if reason.kind in ("no-gain", "not-floating") for owner in reason.modules]
        for point in (_all_low(problem, chosen, idle), _low_in_turn(problem, chosen, idle, self._space.budget)):
            if self._holds(point):
                return kept_in(problem, point)
        return kept_in(problem, chosen)

    def _adds(self, predicted: float) -> float:
        """What lowering more is predicted to add to the error: of their squares, as much as to what was predicted."""
        squares = self._before**2 + predicted**2 - self._chosen.predicted_error**2
        return math.sqrt(max(squares, 0.0)) - self._before

    def _reason(self, each: Lowered, ran: float | None) -> Reason:
        """ran: the error of a run with it low."""
        before, budget, objective = self._before, self._space.budget, self._problem.objective
        after = before + self._adds(each.predicted) if ran is None else ran
        held = not each.gains and self._idle_hold  # in a run with more than this low
        numbers = Reason(
            "no-gain",
            "",
            adds=after - before if math.isfinite(after) else None,
            left=max(budget - before, 0.0),
            saves=max(each.saves, 0.0),
            ran=ran is not None,
        )
        if not held and not after <= budget:
            words = over(before, after, budget, each.saves, objective, ran is not None)
            return replace(numbers, kind="budget", words=words)
        if each.gains:
            words = close(before, after, budget, MARGIN * budget, ran is not None)
            return replace(numbers, kind="margin", words=words)
        scopes, least = self._length(each)
        return replace(numbers, words=no_gain(each.saves, objective, scopes, least, alone=not held))

    def _length(self, each: Lowered) -> tuple[int, float]:
        """How many scopes longer the plan would be, and which share of what it takes these must save."""
        longer, island = self._problem.island, self._problem.island
        if each.point is not None:
            longer = (each.point.price - each.point.cost) - (self._chosen.price - self._chosen.cost)
        cost = self._chosen.cost
        return round(longer / island) if island else 1, longer / cost if cost else 0.0


def with_reasons(space: Modules, plan: Plan, findings: Sequence[Finding]) -> Plan:
    """The plan with one reason for every module and operation that it does not run low, and the least that has to stay."""
    problem, chosen = space.problem, as_candidate(space.problem, plan)
    weighed = Weighed(space, chosen)
    modules = weighed.reasons()
    scopes = {
        path: replace(choice, because=_codes_and_words(problem, path, modules, findings))
        if choice.precision == "fp32" or choice.keep
        else choice
        for path, choice in plan.scopes.items()
    }
    reasons = (*_of_operations(problem, modules), *operation_reasons(problem, chosen))
    return replace(plan, scopes=scopes, reasons=reasons, least=weighed.least(modules) if modules else ())


def _codes_and_words(
    problem: Problem, path: str, reasons: Sequence[Reason], findings: Sequence[Finding]
) -> tuple[str, ...]:
    """Rules that fired on the scope's unsafe and sensitive nodes that are kept, then the reasons of what is."""
    said = [
        (of_function(each), reason.words) for reason in reasons for each in reason.modules if module_of(each) == path
    ]
    functions = {function_in(*found) for found, _ in said if found is not None}
    own = (node.name for node in problem.operations_of.get(path, ()))
    kept = {name for name in own if not functions or problem.variable(name) in functions}
    marked = {name for name in kept if problem.verdicts[name].verdict != "safe"}
    codes = sorted({f.rule for f in findings if f.node in marked and problem.format in f.formats})
    return (*codes, *(words if found is None else f"{found[1]}: {words}" for found, words in said))


def _of_operations(problem: Problem, reasons: Sequence[Reason]) -> Iterator[Reason]:
    """The reasons of kept functions as those of their operations."""
    for reason in reasons:
        functions = {path for path in reason.modules if path != module_of(path)}
        if modules := tuple(path for path in reason.modules if path not in functions):
            yield replace(reason, modules=modules)
        if functions:
            nodes, twins = problem.capture.nodes, problem.capture.twins
            names = tuple(name for name in nodes if problem.variable(name) in functions and name not in twins)
            yield replace(reason, modules=(), operations=names)


def _briefly(reasons: Sequence[Reason], objective: str) -> Iterable[Reason]:
    """Where many gain little, each by another share, one clause for all of them."""
    small = [reason for reason in reasons if reason.kind == "no-gain" and reason.saves]
    if len({reason.words for reason in small}) <= SHARES:
        return reasons
    most = max(reason.saves or 0.0 for reason in small)
    words = little(most, objective, alone=small[0].words.startswith(ALONE))
    return [replace(reason, words=words) if reason.kind == "no-gain" and reason.saves else reason for reason in reasons]


def kept_in(problem: Problem, point: Candidate) -> tuple[str, ...]:
    """Modules that a choice keeps in FP32, whole or in part, of those with something in them that has a precision."""
    kept = [owner for owner in _kept(problem, point) if _without_operations(problem, owner) is None]
    return tuple(dict.fromkeys(module_of(owner) for owner in kept))


def _kept(problem: Problem, point: Candidate) -> list[str]:
    """Modules in FP32, and functions that low ones keep so."""
    kept = [owner for owner in problem.energy.scopes if point.precision.get(owner, "fp32") == "fp32"]
    return [owner for owner in kept if owner == module_of(owner) or module_of(owner) not in kept]


def _all_low(problem: Problem, chosen: Candidate, owners: Iterable[str]) -> Candidate:
    return evaluate(
        problem, _changed(problem, chosen, [each for owner in owners for each in lowered_with(problem, owner)])
    )


def _low_in_turn(problem: Problem, chosen: Candidate, owners: Iterable[str], budget: float) -> Candidate:
    found, tries = chosen, VISITS // max(len(problem.capture.nodes), 1)
    for owner, _ in zip(owners, range(tries), strict=False):
        point = evaluate(problem, _changed(problem, found, lowered_with(problem, owner)))
        if point.predicted_error <= max(budget, chosen.predicted_error):
            found = point
    return found


def _own_saving(problem: Problem, owner: str) -> float:
    low, high, _ = problem.energy.scopes[owner]
    return high - low


def _without_operations(problem: Problem, owner: str) -> Reason | None:
    nodes = [node for node in problem.operations_of.get(module_of(owner), ()) if _in(problem, node.name, owner)]
    if not nodes:
        return Reason("not-floating", "it has no operations of its own, only modules in it")
    if not any(node.floating or problem.lowest.resolution.touches_low(node.name) for node in nodes):
        if any(node.floating for node in nodes):
            return None
        return Reason("not-floating", "it has no floating-point operations")
    return None


def _in(problem: Problem, name: str, owner: str) -> bool:
    """Whether a node is a module's own, or part of a function in one."""
    return owner in (problem.capture.nodes[name].owner, problem.variable(name))


def lowered_with(problem: Problem, owner: str) -> tuple[str, ...]:
    """What is low if a module is lowered: itself, what shares a weight with it, and the functions in it that could stay FP32."""
    group = {owner, *problem.energy.tied_to(owner)}
    functions = {function_in(path, name) for path in group for name in problem.exceptions.get(path, ())}
    return tuple(sorted(group | (functions - problem.lowest.raised.keys())))


def _changed(problem: Problem, chosen: Candidate, group: Iterable[str]) -> dict[str, str]:
    """The choice with these low; a function whose keeping lets others be low stays kept, unless it is the question."""
    kept = (path for path in problem.lowest.raised if path != module_of(path))
    lowered = dict.fromkeys(group, problem.format)
    return problem.energy.settled({**chosen.precision, **dict.fromkeys(kept, "fp32"), **lowered})


def _forbidden(problem: Problem, chosen: Candidate, now: Resolution, owner: str) -> Reason | None:
    """Why lowering a module is out of the question; None where it is not."""
    group = lowered_with(problem, owner)
    changed = _changed(problem, chosen, group)
    if changed[owner] == "fp32":
        return Reason("author", "the author switches autocast off around it")
    then = problem.resolve(labelled(changed))
    broken = [
        name for name in problem.capture.nodes if problem.forbidden(then, name) and not problem.forbidden(now, name)
    ]
    if not broken:
        return None
    nodes = problem.capture.nodes
    worst = max(
        broken, key=lambda name: (_in(problem, name, owner), nodes[name].owner in group, _weight(problem, name))
    )
    return _because(problem, then, owner, group, worst)


def _because(problem: Problem, then: Resolution, owner: str, group: tuple[str, ...], worst: str) -> Reason:
    where, verdict = problem.capture.nodes[worst].owner, problem.verdicts[worst]
    name = problem.capture.twins.get(worst, worst)
    if owner != module_of(owner) and owner in problem.lowest.raised and worst in then.conflicts:
        reader = name if where == module_of(owner) else f"{name} in {where or 'the whole model'}"
        words = f"{reader} would be handed tensors of two dtypes, which raises an error"
        return Reason("conflict", f"it gives FP32 anyhow; with no function kept {words}", by=name)
    if worst in then.conflicts and verdict.verdict not in ("unsafe", "untested"):
        kind, why = "conflict", f"{name} would be handed tensors of two dtypes, which raises an error"
    else:
        kind, why = verdict.verdict, f"{name} is {verdict.verdict}: {verdict.reason}"
    if _in(problem, worst, owner):
        return Reason(kind, why, by=name)
    if where in group:
        return Reason("tied", f"it shares a weight with {where or 'the whole model'}, where {why}", by=where)
    if where == module_of(owner):
        return Reason("inherited", f"low, it would hand on low values: {why}", by=name)
    return Reason(
        "inherited", f"low, it would hand on low values to {where or 'the whole model'}, where {why}", by=where
    )


def _weight(problem: Problem, name: str) -> float:
    contribution = problem.contributions.get(name)
    return contribution.isolated if contribution is not None else 0.0


def _lowered(problem: Problem, chosen: Candidate, owner: str) -> Lowered:
    group = lowered_with(problem, owner)
    point = evaluate(problem, _changed(problem, chosen, group))
    saves = 1 - point.cost / chosen.cost if chosen.cost else 0.0
    return Lowered(owner, group, point, saves, point.predicted_error, point.price < chosen.price)


def _estimated(problem: Problem, chosen: Candidate, owner: str) -> Lowered:
    group = lowered_with(problem, owner)
    saved = sum(_own_saving(problem, each) for each in group)
    square = sum(problem.energy.scopes[each][2] for each in group)
    predicted = math.sqrt(chosen.predicted_error**2 + min(square, FORBIDDEN))
    return Lowered(owner, group, None, saved / chosen.cost if chosen.cost else 0.0, predicted, saved > problem.island)
