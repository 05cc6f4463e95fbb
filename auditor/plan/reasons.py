"""Why every module that stays FP32 under a plan does: what forbids it, or what lowering it alone would add and save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..paths import function_in, module_of
from ..records import Reason
from ..replay.chosen import labelled
from ..replay.resolve import Resolution
from .choose import FAR, MOST_OFF, Runs
from .clauses import ALONE, close, little, no_gain, over
from .costs import heavy
from .energy import FORBIDDEN
from .problem import Problem
from .solve import Candidate, evaluate

VISITS = 60_000
"""Operations looked at, over all modules that are lowered in thought: the rest is estimated from the terms of the cut."""

RUNS, RUN_VISITS = 24, 12_000
"""Modules that are lowered in a run of the recorded graph, at most, and operations in all of these runs; what the others add
is predicted, and said to be."""

SHARES = 4
"""Different shares of time that modules may save without being worth it, each in a clause of its own."""

FEW_RUNS = 4
"""How many there may be where runs are dear: the first is run, and of the others those that a prediction leaves open."""

Error = Callable[[Candidate], float]
"""Error of the recorded graph under a choice; inf where it cannot run."""


@dataclass(frozen=True)
class Limits:
    """budget: the error that is allowed; target: the share of it that the plan was made to use; error: the plan's."""

    budget: float
    target: float
    error: float


@dataclass(frozen=True)
class Lowered:
    """One module lowered in thought, with those that must go along. point: None where it is only estimated."""

    owner: str
    group: tuple[str, ...]
    point: Candidate | None
    saves: float
    predicted: float
    gains: bool


class EachLowered:
    """Every module in FP32, and every function that a low one keeps so, lowered by itself in thought: what forbids that, or
    what it gains."""

    def __init__(self, problem: Problem, chosen: Candidate) -> None:
        self.problem, self.chosen = problem, chosen
        self.kept = _kept(problem, chosen)
        self.forbidden: dict[str, Reason] = {}
        self.open: list[Lowered] = []
        now = problem.resolve(labelled(chosen.precision))
        tries = VISITS // max(len(problem.capture.nodes), 1)
        for owner in sorted(self.kept, key=lambda owner: (-_own_saving(problem, owner), owner)):
            reason = _without_operations(problem, owner)
            if reason is None and tries > 0:
                tries -= 1
                reason = _forbidden(problem, chosen, now, owner)
            if reason is not None:
                self.forbidden[owner] = reason
                continue
            self.open.append(_lowered(problem, chosen, owner) if tries > 0 else _estimated(problem, chosen, owner))

    @property
    def idle(self) -> list[Lowered]:
        """What gains nothing."""
        return [each for each in self.open if not each.gains]

    @property
    def ahead(self) -> list[Candidate]:
        """What is run to weigh them, or may be."""
        gaining, most = [each for each in self.open if each.gains], most_runs(self.problem)
        points = [each.point for group in (gaining, self.open) for each in group[:most] if each.point is not None]
        if self.idle:
            points.append(_all_low(self.problem, self.chosen, [each.owner for each in self.idle]))
        return [*{id(point): point for point in points}.values()]


class Weighed:
    """Modules that were lowered in thought, weighed by runs: budget or gain. Those that gain most are run, and of those that
    gain nothing all together, to see that they hold; each when it is asked for. known: whether a point was run."""

    def __init__(
        self, lowered: EachLowered, limits: Limits, error: Error, known: Callable[[Candidate], bool] = lambda _: False
    ) -> None:
        self._lowered, self._limits, self._error, self._known = lowered, limits, error, known

    @cached_property
    def _harmless(self) -> bool:
        idle, chosen = self._lowered.idle, self._lowered.chosen
        return not idle or _all_hold(self._lowered.problem, chosen, idle, self._limits, self._error)

    def _asked(self) -> Iterator[tuple[Lowered, Candidate]]:
        """Those that are run."""
        dear = heavy(self._lowered.problem.costs)
        left = most = most_runs(self._lowered.problem)
        for each in self._lowered.open:
            if not left:
                return
            if each.point is not None and (each.gains or not self._harmless):
                left -= 1
                if not dear or left == most - 1 or self._is_open(each):
                    yield each, each.point

    def _is_open(self, each: Lowered) -> bool:
        """Whether a run may find it on the other side of the budget than predicted, should what it adds be off by as much as
        predictions are."""
        before, budget = self._limits.error, self._limits.budget
        adds = adds_to(each.predicted, self._lowered.chosen, self._limits)
        most, least = max(adds, MOST_OFF * adds), min(adds, adds / MOST_OFF)
        return not (before + most <= budget or before + least > budget)

    def affordable(self, own: float, target: float) -> tuple[str, ...]:
        """Modules that gain something low and, in a run, hold the budget, and add to an error of `own` what keeps it within
        `target`."""
        gaining, found = sum(each.gains for each in self._lowered.open), []
        for each, point in self._asked() if gaining else ():
            if each.gains:
                gaining -= 1
                if holds(self._error(point), self._limits, own, target):
                    found.append(each.owner)
            if not gaining:
                break
        return tuple(owner for owner in self._lowered.kept if owner in found and owner == module_of(owner))

    def reasons(self) -> tuple[Reason, ...]:
        """One for every module and function, those alike together."""
        problem, chosen = self._lowered.problem, self._lowered.chosen
        points = {each.owner: point for each, point in self._asked()}
        points |= {
            e.owner: e.point for e in self._lowered.open if e.gains and e.point is not None and self._known(e.point)
        }
        ran = {owner: self._error(point) for owner, point in points.items()}
        found = dict(self._lowered.forbidden)
        for each in self._lowered.open:
            held = not each.gains and self._harmless
            found[each.owner] = _reason(problem, each, chosen, self._limits, ran.get(each.owner), held)
        kept = [replace(found[owner], modules=(owner,)) for owner in self._lowered.kept]
        return together(_briefly(kept, problem.objective))


def _briefly(reasons: Sequence[Reason], objective: str) -> Iterable[Reason]:
    """Where many gain little, each by another share, one clause for all of them."""
    small = [reason for reason in reasons if reason.kind == "no-gain" and reason.saves]
    if len({reason.words for reason in small}) <= SHARES:
        return reasons
    most = max(reason.saves or 0.0 for reason in small)
    words = little(most, objective, alone=small[0].words.startswith(ALONE))
    return [replace(reason, words=words) if reason.kind == "no-gain" and reason.saves else reason for reason in reasons]


def holds(after: float, limits: Limits, own: float, target: float) -> bool:
    """Whether an error holds the budget, and what it adds to the plan's keeps one of `own` within the target."""
    return after <= limits.budget and own + (after - limits.error) <= target


def least(
    problem: Problem, chosen: Candidate, reasons: Iterable[Reason], limits: Limits, error: Error
) -> tuple[str, ...]:
    """Modules without which in FP32 the budget is known to hold, all others low: those that a run says so of.

    From what the plan keeps, all that gains nothing is lowered; where that does not hold together, one after the other as
    long as the prediction allows it; and where a run does not bear that out, nothing.
    """
    idle = [owner for reason in reasons if reason.kind in ("no-gain", "not-floating") for owner in reason.modules]
    for point in (_all_low(problem, chosen, idle), _low_in_turn(problem, chosen, idle, limits.budget)):
        if _may_hold(point, chosen, limits) and error(point) <= limits.budget:
            return kept_in(problem, point)
    return kept_in(problem, chosen)


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


def together(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Reasons that say the same of several, once; of what gains nothing, with the largest numbers."""
    found: dict[tuple[Reason, bool], list[Reason]] = {}
    for reason in reasons:
        alike = replace(reason, modules=(), operations=())
        idle = reason.kind == "no-gain" and reason.adds is not None
        found.setdefault((replace(alike, adds=None, saves=None) if idle else alike, idle), []).append(reason)
    return tuple(
        replace(
            alike,
            modules=tuple(path for each in several for path in each.modules),
            operations=tuple(name for each in several for name in each.operations),
            adds=max((each.adds for each in several if each.adds is not None), default=None),
            saves=max((each.saves for each in several if each.saves is not None), default=None),
        )
        for (alike, _), several in found.items()
    )


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


def lowering(problem: Problem, chosen: Candidate, modules: Iterable[str]) -> Candidate:
    """The choice with these low too, and what must go along."""
    together = {other for path in modules for other in lowered_with(problem, path)}
    return evaluate(problem, problem.energy.settled({**chosen.precision, **dict.fromkeys(together, problem.format)}))


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


def most_runs(problem: Problem) -> int:
    """How many modules are lowered in runs."""
    if heavy(problem.costs):
        return FEW_RUNS
    return min(RUNS, max(RUN_VISITS // max(len(problem.capture.nodes), 1), FEW_RUNS))


def _all_hold(problem: Problem, chosen: Candidate, idle: list[Lowered], limits: Limits, error: Error) -> bool:
    point = _all_low(problem, chosen, [each.owner for each in idle])
    return _may_hold(point, chosen, limits) and error(point) <= limits.budget


def _may_hold(point: Candidate, chosen: Candidate, limits: Limits) -> bool:
    """Whether a run may show that a choice holds: not where it lowers what is unsafe, nor where it would be over the budget
    by far, should it be off by as much as the plan was."""
    runs = Runs()
    runs.learn(chosen, limits.error)
    return point.predicted_error < math.sqrt(FORBIDDEN) and runs.expected(point) <= FAR * limits.budget


def adds_to(predicted: float, chosen: Candidate, limits: Limits) -> float:
    """What lowering more is predicted to add to the plan's error: of their squares, as much as to what was predicted of the plan."""
    squares = limits.error**2 + predicted**2 - chosen.predicted_error**2
    return math.sqrt(max(squares, 0.0)) - limits.error


def _reason(
    problem: Problem, each: Lowered, chosen: Candidate, limits: Limits, ran: float | None, held: bool
) -> Reason:
    """held: whether a run with more than this lowered is within the budget."""
    before = limits.error
    after = before + adds_to(each.predicted, chosen, limits) if ran is None else ran
    numbers = Reason(
        "no-gain",
        "",
        adds=after - before if math.isfinite(after) else None,
        left=max(limits.budget - limits.error, 0.0),
        saves=max(each.saves, 0.0),
        ran=ran is not None,
    )
    if not held and not after <= limits.budget:
        words = over(before, after, limits.budget, each.saves, problem.objective, ran is not None)
        return replace(numbers, kind="budget", words=words)
    if each.gains:
        return replace(
            numbers, kind="margin", words=close(before, after, limits.budget, limits.target, ran is not None)
        )
    scopes, least = _length(problem, each, chosen)
    return replace(numbers, words=no_gain(each.saves, problem.objective, scopes, least, alone=not held))


def _length(problem: Problem, each: Lowered, chosen: Candidate) -> tuple[int, float]:
    """How many scopes longer the plan would be, and which share of what it takes these must save."""
    longer = problem.island
    if each.point is not None:
        longer = (each.point.price - each.point.cost) - (chosen.price - chosen.cost)
    scopes = round(longer / problem.island) if problem.island else 1
    return scopes, longer / chosen.cost if chosen.cost else 0.0
