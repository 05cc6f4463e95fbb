"""A finished plan with its reasons: one for every module and operation that it does not run low."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ..formats.table import runs
from ..paths import function_in, module_of, of_function
from ..records import Baseline, Finding, Plan, Reason
from ..replay.chosen import labelled, scoped
from .affordable import affordable_at_once
from .choose import as_plan, simulated_error
from .costs import heavy
from .operations import operation_reasons
from .problem import Problem
from .reasons import EachLowered, Limits, Weighed, kept_in, least, lowering
from .solve import Candidate, evaluate
from .trial import Trial


class Explained:
    """A plan and the runs that say why it keeps what it keeps: each is made when something asks for what it says, since a plan
    that they show to be improvable is not the last one.

    target: the error that the plan was made for. Modules are lowered on the batches of `trial`: those that the plan is verified
    on, where the graph can be run on them. all_low: error of the model with everything low, where it was run on those.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        trial: Trial,
        budget: float,
        target: float,
        findings: Sequence[Finding],
        all_low: float | None = None,
    ) -> None:
        self._problem, self._plan, self._findings, self._all_low = problem, plan, findings, all_low
        self._chosen = chosen = as_candidate(problem, plan)
        self._known: dict[tuple[tuple[str, str], ...], float] = {}
        self._lowered = lowered = EachLowered(problem, chosen)
        self._trial = _beside(problem, lowered, trial)
        own = self._error(chosen) if len({*chosen.precision.values()}) > 1 else 0.0
        self._limits = Limits(budget, target, own if math.isfinite(own) else chosen.predicted_error)
        self._weighed = Weighed(lowered, self._limits, self._error, lambda point: _key(point) in self._known)

    def _error(self, point: Candidate) -> float:
        key = _key(point)
        if key not in self._known:
            self._known[key] = simulated_error(self._problem, point, self._trial)
            if self._all_low is not None and not kept_in(self._problem, point):
                self._known[key] = max(self._known[key], self._all_low)
        return self._known[key]

    def affordable(self, target: float) -> tuple[str, ...]:
        """Modules that gain something low and, in a run, stay within what the plan was made to use."""
        own = self._plan.measured_error or 0.0
        if self._plan.measured_error is None and self._plan.verification is None:
            own = self._limits.error
        if heavy(self._problem.costs):
            return affordable_at_once(self._lowered, self._limits, self._error, own, target)
        return self._weighed.affordable(own, target)

    def pause(self) -> None:
        """Give up what runs begin from, while others need the memory."""
        self._trial.forget()

    @cached_property
    def whole(self) -> Plan:
        """The plan with `reasons`, what they say of its scopes, and the least that has to stay."""
        problem, plan, modules = self._problem, self._plan, self._weighed.reasons()
        scopes = {
            path: replace(choice, because=_because(problem, path, modules, self._findings))
            if choice.precision == "fp32" or choice.keep
            else choice
            for path, choice in plan.scopes.items()
        }
        reasons = (*_placed(problem, modules), *operation_reasons(problem, self._chosen))
        stays = least(problem, self._chosen, modules, self._limits, self._error) if modules else ()
        return replace(plan, scopes=scopes, reasons=reasons, least=stays)


def _key(point: Candidate) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(point.precision.items()))


def _beside(problem: Problem, lowered: EachLowered, trial: Trial) -> Trial:
    """The trial for runs of the plan and of what differs from it in few modules; where runs are dear, and so what they keep is large,
    only what is known to be needed is kept."""
    if not heavy(problem.costs):
        return trial.near()
    return trial.near([problem.running(labelled(point.precision)) for point in (lowered.chosen, *lowered.ahead)])


def plainly_low(plan: Plan, baseline: Baseline) -> float | None:
    """Error of the model with everything low, as it was run: inf where that failed; None where it could not be tried."""
    if not runs(plan.format):
        return None
    return math.inf if baseline.measured_error is None or not baseline.finite else baseline.measured_error


def with_low(problem: Problem, plan: Plan, modules: Sequence[str]) -> Plan:
    """The plan with these modules low too."""
    return as_plan(problem, lowering(problem, as_candidate(problem, plan), modules))


def as_candidate(problem: Problem, plan: Plan) -> Candidate:
    """What a plan chooses, evaluated."""
    return evaluate(problem, {owner: scoped(plan.scopes)(owner) for owner in problem.energy.scopes})


def _because(problem: Problem, path: str, reasons: Sequence[Reason], findings: Sequence[Finding]) -> tuple[str, ...]:
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


def _placed(problem: Problem, reasons: Sequence[Reason]) -> Iterator[Reason]:
    """The reasons of kept functions as those of their operations."""
    for reason in reasons:
        functions = {path for path in reason.modules if path != module_of(path)}
        if modules := tuple(path for path in reason.modules if path not in functions):
            yield replace(reason, modules=modules)
        if functions:
            nodes, twins = problem.capture.nodes, problem.capture.twins
            names = tuple(name for name in nodes if problem.variable(name) in functions and name not in twins)
            yield replace(reason, modules=(), operations=names)
