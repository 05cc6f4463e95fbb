"""Why every module that stays FP32 under a plan does: what forbids it, or what lowering it alone would add and save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..execution.policy import labelled
from ..execution.resolve import Resolution
from ..paths import function_in, module_of, of_function
from ..records import Finding, Plan, Reason
from .clauses import added, no_gain, operation_reasons, together
from .energy import FORBIDDEN
from .modules import Modules, as_candidate
from .problem import Problem
from .search import MARGIN, MOST_OFF, WORTH
from .solve import Candidate, evaluate

VISITS, FEW = 60_000, 10
"""Operations looked at for what lowering each module really comes to, and how many modules that are at least; of the rest
the energy tells."""


@dataclass(frozen=True)
class Lowered:
    """One module lowered in thought, with those that must go along. saves: the share of what the choice takes; gain: the
    same of its price; square: the squared error that is predicted to be added."""

    owner: str
    saves: float
    gain: float
    square: float

    @property
    def gains(self) -> bool:
        """Whether it is worth its place in the plan."""
        return self.gain > 0


class Weighed:
    """A choice, and every module in FP32 and every function that a low one keeps so, lowered by itself: what forbids that, or
    what a replay says that it adds.

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
        left = max(VISITS // len(self._problem.capture.nodes), FEW) if self._kept else 0
        for owner in sorted(self._kept, key=lambda owner: (-self._problem.energy.saving(owner), owner)):
            found = _without_operations(self._problem, owner) or self._lowered(owner, exactly=left > 0)
            left -= 1
            if isinstance(found, Reason):
                self._forbidden[owner] = found
            else:
                self._open.append(found)

    def _lowered(self, owner: str, *, exactly: bool) -> Lowered | Reason:
        """What lowering a module comes to, or what forbids it. exactly: not only as far as the energy tells."""
        problem, chosen = self._problem, self._chosen
        wanted, value = problem.energy.changed(chosen.precision, _changes(problem, [owner]))
        if not exactly and owner in wanted and (broken := _broken_in(problem, owner)):
            worst = max(broken, key=lambda name: _weight(problem, name))
            return _because(problem, problem.lowest.resolution, owner, lowered_with(problem, owner), worst)
        if not exactly and owner in wanted and value.square < FORBIDDEN / 2:
            return Lowered(owner, _share(-value.cost, chosen.cost), _share(-value.price, chosen.price), value.square)
        point = _lowering(problem, chosen, [owner])
        if (reason := _forbidden(problem, point, chosen, owner)) is not None:
            return reason
        saves, gain = _share(chosen.cost - point.cost, chosen.cost), _share(chosen.price - point.price, chosen.price)
        return Lowered(owner, saves, gain, point.predicted_error**2 - chosen.predicted_error**2)

    def improved(self, limit: float) -> Candidate:
        """The choice with what gains low as well, one module after the other, as long as replays stay within the limit."""
        found = self._chosen
        for each in self._open:
            if each.gain > WORTH and each.owner == module_of(each.owner) and self._may_hold(each.square, limit):
                point = _lowering(self._problem, found, [each.owner])
                if point.feasible and point.price < (1 - WORTH) * found.price:
                    error = self._space.error_within_means(point.precision)
                    found = point if error is not None and error <= limit else found
        return found

    def with_idle_low(self) -> Candidate | None:
        """The choice with all low that gains nothing, where a replay of that holds the budget."""
        idle = [each.owner for each in self._open if not each.gains]
        point = _lowering(self._problem, self._chosen, idle) if idle else self._chosen
        if point == self._chosen:
            return point
        square = point.predicted_error**2 - self._chosen.predicted_error**2
        may_hold = point.feasible and self._may_hold(square, self._space.budget)
        error = self._space.error_within_means(point.precision) if may_hold else None
        return point if error is not None and error <= self._space.budget else None

    def reasons(self) -> tuple[Reason, ...]:
        """One for every module and function, those alike together."""
        found, together_low = dict(self._forbidden), self.with_idle_low() is not None
        most = max((each.saves for each in self._open if not each.gains), default=0.0)
        for each in self._open:
            held = together_low and not each.gains  # in a replay with more than this low
            low = _labels(self._problem, self._chosen, [each.owner])
            ran = None if held else self._space.error_within_means(low)
            found[each.owner] = self._reason(each, ran, held, most)
        return together([replace(found[owner], modules=(owner,)) for owner in self._kept])

    def _reason(self, each: Lowered, ran: float | None, held: bool, most: float) -> Reason:
        """ran: the error of a replay with it low. held: whether the budget held with it low. most: what of all that gains nothing
        saves most."""
        before, budget, objective = self._before, self._space.budget, self._problem.objective
        after = self._after(each.square) if ran is None else ran
        adds, saves = after - before if math.isfinite(after) else None, max(each.saves, 0.0)
        if each.gains or not (held or after <= budget):
            kind = "margin" if after <= budget else "budget"
            words = added(before, after, budget, MARGIN, saves, objective, ran is not None)
        else:
            kind, words = "no-gain", no_gain(most if saves else 0.0, objective, alone=not held)
        return Reason(kind, words, adds=adds, left=max(budget - before, 0.0), saves=saves, ran=ran is not None)

    def _may_hold(self, square: float, limit: float) -> bool:
        """Whether the error may stay within the limit, should predictions be off by as much as they are at most."""
        return self._before + (self._after(square) - self._before) / MOST_OFF <= limit

    def _after(self, square: float) -> float:
        """The error that is predicted of a choice with more low: squares add up."""
        return math.sqrt(max(self._before**2 + square, 0.0))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
    least = kept_in(problem, weighed.with_idle_low() or chosen) if modules else ()
    return replace(plan, scopes=scopes, reasons=reasons, least=least)


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


def kept_in(problem: Problem, point: Candidate) -> tuple[str, ...]:
    """Modules that a choice keeps in FP32, whole or in part, of those with something in them that has a precision."""
    kept = [owner for owner in _kept(problem, point) if _without_operations(problem, owner) is None]
    return tuple(dict.fromkeys(module_of(owner) for owner in kept))


def _kept(problem: Problem, point: Candidate) -> list[str]:
    """Modules in FP32, and functions that low ones keep so."""
    kept = [owner for owner in problem.energy.scopes if point.precision.get(owner, "fp32") == "fp32"]
    return [owner for owner in kept if owner == module_of(owner) or module_of(owner) not in kept]


def _without_operations(problem: Problem, owner: str) -> Reason | None:
    nodes = [node for node in problem.operations_of.get(module_of(owner), ()) if _in(problem, node.name, owner)]
    if not nodes:
        return Reason("not-floating", "it has no operations of its own, only modules in it")
    if not any(node.floating or problem.lowest.resolution.touches_low(node.name) for node in nodes):
        if any(node.floating for node in nodes):
            return None
        return Reason("not-floating", "it has no floating-point operations")
    return None


def _broken_in(problem: Problem, owner: str) -> list[str]:
    """Operations of a module's own that forbid that it is low, whatever others are."""
    own = (node.name for node in problem.operations_of.get(module_of(owner), ()) if _in(problem, node.name, owner))
    return [name for name in own if problem.forbidden(problem.lowest.resolution, name)]


def _in(problem: Problem, name: str, owner: str) -> bool:
    """Whether a node is a module's own, or part of a function in one."""
    return owner in (problem.capture.nodes[name].owner, problem.variable(name))


def lowered_with(problem: Problem, owner: str) -> tuple[str, ...]:
    """What is low if a module is lowered: itself, what shares a weight with it, and the functions in it that could stay FP32."""
    group = {*problem.energy.together(owner)}
    functions = {function_in(path, name) for path in group for name in problem.exceptions.get(path, ())}
    return tuple(sorted(group | (functions - problem.lowest.raised.keys())))


def _changes(problem: Problem, owners: Iterable[str]) -> dict[str, str]:
    """What lowering these asks for; a function whose keeping lets others be low stays kept, unless it is the question."""
    kept = (path for path in problem.lowest.raised if path != module_of(path))
    group = (each for owner in owners for each in lowered_with(problem, owner))
    return {**dict.fromkeys(kept, "fp32"), **dict.fromkeys(group, problem.format)}


def _labels(problem: Problem, chosen: Candidate, owners: Iterable[str]) -> dict[str, str]:
    """The precisions of the choice with these low, and what goes along."""
    return problem.energy.settled({**chosen.precision, **_changes(problem, owners)})


def _lowering(problem: Problem, chosen: Candidate, owners: Iterable[str]) -> Candidate:
    return evaluate(problem, _labels(problem, chosen, owners))


def _forbidden(problem: Problem, point: Candidate, chosen: Candidate, owner: str) -> Reason | None:
    """Why lowering a module is out of the question; None where it is not. point: with it low."""
    if point.precision[owner] == "fp32":
        return Reason("author", "the author switches autocast off around it")
    if point.feasible:
        return None
    now, then = (problem.resolve(labelled(each.precision)) for each in (chosen, point))
    nodes, group = problem.capture.nodes, lowered_with(problem, owner)
    broken = [name for name in nodes if problem.forbidden(then, name) and not problem.forbidden(now, name)]
    if not broken:
        return None
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
