"""A finished plan with its reasons: one for every module and operation that it does not run low."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..paths import function_in, module_of, of_function
from ..records import Finding, Plan, Reason
from ..replay.chosen import labelled, scoped
from .choose import as_plan, near, simulated_error
from .costs import heavy
from .operations import operation_reasons
from .problem import Problem
from .reasons import Limits, kept_in, least, lowered_with, module_reasons
from .solve import Candidate, evaluate
from .trial import Trial


@dataclass(frozen=True)
class Explained:
    """A plan with `reasons`, and what they say of its scopes. least: those modules that have to stay, found when asked for:
    that takes runs, and a plan which its reasons show to be improvable is not the last one."""

    plan: Plan
    least: Callable[[], tuple[str, ...]]

    @property
    def whole(self) -> Plan:
        """The plan with all of it."""
        return replace(self.plan, least=self.least())


def explained(
    problem: Problem,
    plan: Plan,
    trial: Trial,
    budget: float,
    target: float,
    findings: Sequence[Finding],
    all_low: float | None = None,
) -> Explained:
    """Why a plan keeps what it keeps. target: the error that it was made for.

    Modules are lowered on the batches of `trial`: those that the plan is verified on, where the graph can be run on them.
    all_low: error of the model with everything low, where it was run on those that the plan is verified on.
    """
    chosen = as_candidate(problem, plan)
    known: dict[tuple[tuple[str, str], ...], float] = {}

    def error(point: Candidate) -> float:
        key = tuple(sorted(point.precision.items()))
        if key not in known:
            known[key] = simulated_error(problem, point, trial)
            if all_low is not None and not kept_in(problem, point):
                known[key] = max(known[key], all_low)
        return known[key]

    own = 0.0
    if len({*chosen.precision.values()}) > 1:
        trial = _beside(problem, chosen, trial)
        own = error(chosen)
    limits = Limits(budget, target, own if math.isfinite(own) else chosen.predicted_error)
    modules = module_reasons(problem, chosen, limits, error)
    scopes = {
        path: replace(choice, because=_because(problem, path, modules, findings))
        if choice.precision == "fp32" or choice.keep
        else choice
        for path, choice in plan.scopes.items()
    }
    reasons = (*_placed(problem, modules), *operation_reasons(problem, chosen))
    return Explained(
        replace(plan, scopes=scopes, reasons=reasons),
        lambda: least(problem, chosen, modules, limits, error) if modules else (),
    )


def _beside(problem: Problem, chosen: Candidate, trial: Trial) -> Trial:
    """The trial for what differs from the plan in few modules; where a run is dear, and the plan's is known, as it is:
    to make that once more would cost what it saves."""
    known = heavy(problem.costs) and trial.knows(problem.running(labelled(chosen.precision)))
    return trial if known else near(problem, chosen, trial)


def affordable(plan: Plan, target: float) -> tuple[str, ...]:
    """Modules that gain something low and, in a run, stay within what the plan was made to use."""
    own = plan.measured_error or 0.0
    found = (reason for reason in plan.reasons if reason.kind == "margin" and reason.ran and reason.adds is not None)
    return tuple(path for reason in found if own + (reason.adds or 0.0) <= target for path in reason.modules)


def with_low(problem: Problem, plan: Plan, modules: Sequence[str]) -> Plan:
    """The plan with these modules low too."""
    together = {other for path in modules for other in lowered_with(problem, path)}
    labels = {**as_candidate(problem, plan).precision, **dict.fromkeys(together, problem.format)}
    return as_plan(problem, evaluate(problem, problem.energy.settled(labels)))


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
            names = tuple(name for name in problem.capture.nodes if problem.variable(name) in functions)
            yield replace(reason, modules=(), operations=names)
