"""What happens without a plan: everything low, or FP32 only where a rule fired, measured on the inputs plans are checked on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..numerics.kernels import UnsupportedInFormat
from ..records import Baseline, Finding, Plan
from ..simulation.strategies import plain, running
from .choose import Trial, plain_plan, simulated_error
from .energy import energy_of
from .plans import verify
from .problem import Problem
from .solve import Candidate, evaluate
from .workbench import Workbench


def baselines_of(bench: Workbench, strategies: Sequence[str], formats: Sequence[str]) -> dict[str, Baseline]:
    """Plain autocast, plain cast, and beside each what the rules alone would do, with nothing measured.

    They are run as the captured graph, which answers as the patched model does; where the plans are checked on batches
    that the graph is not valid for, the model itself is run low instead.
    """
    fits = len(bench.usable(bench.checks)) == len(bench.checks)
    trial = bench.trial(bench.checks if fits else bench.usable(bench.subject.batches))
    problems = [bench.problem(strategy, fmt) for strategy in strategies for fmt in formats]
    found = {}
    for problem in problems:
        ruled = _ruled(problem, bench.findings)
        rules_only = _measured(simulated_error(problem, ruled, trial), None, ruled.low_flops)
        found[problem.name] = replace(_plain(problem, trial), rules_only=rules_only)
    if fits:
        return found
    plans = {problem.name: plain_plan(problem) for problem in problems}
    checked = verify(bench, plans, lambda _: None)
    return {name: replace(_answered(checked[name]), rules_only=found[name].rules_only) for name in found}


def _plain(problem: Problem, trial: Trial) -> Baseline:
    how = running(problem.capture, problem.strategy, plain(problem.format), problem.format)
    try:
        return _measured(trial.error(how), None, None)
    except UnsupportedInFormat as failure:
        return Baseline(None, False, str(failure).splitlines()[0])


def _answered(plan: Plan) -> Baseline:
    failure = plan.verification.failure if plan.verification else None
    return Baseline(plan.measured_error, plan.measured_error is not None, failure)


def _measured(error: float, failure: str | None, low_flops: float | None) -> Baseline:
    finite = math.isfinite(error)
    return Baseline(error if finite else None, finite, failure, low_flops)


def _ruled(problem: Problem, findings: Sequence[Finding]) -> Candidate:
    """FP32 in every scope where a rule declares an error or a warning, whatever the measurement says; low elsewhere."""
    fired = {
        finding.owner
        for finding in findings
        if problem.format in finding.formats and (finding.declared or finding.severity) != "info"
    }
    energy = energy_of(problem)
    kept = {other for owner in fired for other in (owner, *energy.tied_to(owner))}
    labels = {owner: "fp32" if owner in kept else problem.format for owner in energy.scopes}
    return evaluate(problem, energy.settled(labels))
