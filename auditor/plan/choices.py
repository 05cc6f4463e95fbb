"""Choices with names - everything low, what the rules keep, what another plan keeps - and a choice as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..execution.policy import labelled, plain, scoped
from ..numerics.formats import FORMATS
from ..records import Finding, Plan, ScopeChoice
from ..resources import table
from .costs import memory_of
from .exceptions import needed
from .problem import Problem
from .solve import Candidate, candidates, evaluate


def everything(problem: Problem, precision: str) -> Candidate:
    """All in one precision: low, it is what `torch.autocast` around the model, or a cast of all of it, comes to."""
    return evaluate(problem, dict.fromkeys(problem.energy.scopes, precision))


def ruled(problem: Problem, findings: Sequence[Finding]) -> Candidate:
    """FP32 in every scope where a rule declares an error or a warning, whatever the measurement says; low elsewhere."""
    fired = {
        finding.owner
        for finding in findings
        if problem.format in finding.formats and (finding.declared or finding.severity) != "info"
    }
    return _keeping(problem, fired)


def as_another(problem: Problem, rival: Plan) -> Candidate:
    """The scopes of a plan of another strategy."""
    return _keeping(problem, {owner for owner in problem.energy.scopes if scoped(rival.scopes)(owner) == "fp32"})


def _keeping(problem: Problem, owners: set[str]) -> Candidate:
    """These, and what shares a weight with them, in FP32; low elsewhere."""
    energy = problem.energy
    kept = {other for owner in owners for other in (owner, *energy.tied_to(owner))}
    labels = {owner: "fp32" if owner in kept else problem.format for owner in energy.scopes}
    return evaluate(problem, energy.settled(labels))


def as_candidate(problem: Problem, plan: Plan) -> Candidate:
    """What a plan chooses, evaluated."""
    return evaluate(problem, {owner: scoped(plan.scopes)(owner) for owner in problem.energy.scopes})


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """A choice as a plan that was not run yet."""
    curve = candidates(problem)
    slowest = max(curve, key=lambda point: point.seconds).seconds
    chosen = evaluate(problem, needed(problem, chosen.precision))
    resolution = problem.resolve(labelled(chosen.precision))
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
        memory=memory_of(problem.capture, problem.costs, resolution, problem.format),
        fp32_memory=memory_of(problem.capture, problem.costs, problem.resolve(plain("fp32")), problem.format),
        pareto=tuple((point.predicted_error, point.seconds / slowest if slowest else 1.0) for point in curve),
    )


def _unfit(problem: Problem) -> str:
    """A note on devices without arithmetic in the format."""
    row = FORMATS[problem.format]
    if row.speed in table("plan/devices")[problem.device]:
        return ""
    return f"the {problem.device} has no {row.label} arithmetic: its speed-up is that of moving fewer bytes"


def scopes_of(problem: Problem, chosen: Candidate) -> dict[str, ScopeChoice]:
    """The table of scopes: the root, and every module whose precision differs from that of the module above it."""
    prices = problem.energy.scopes

    def saved(path: str) -> float:
        low, high, _ = prices.get(path, (0.0, 0.0, 0.0))
        return (high - low) / chosen.cost if chosen.cost else 0.0

    return {
        path: ScopeChoice(
            boundary.precision,
            output="keep" if boundary.keeps else "cast",
            cost=saved(path) if boundary.precision == "fp32" else None,
            keep=tuple(sorted(boundary.keep)),
        )
        for path, boundary in problem.running(labelled(chosen.precision)).wrapped.items()
    }
