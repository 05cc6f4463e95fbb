"""All plans of an audit: made, run as the artefact a user gets, tightened where they miss the budget, compared."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..numerics.metrics import worst_output_error
from ..patch.emit import emit
from ..patch.live import plan_table
from ..patch.temporary import patched
from ..records import Baseline, Batch, Plan, Subject, Verification
from ..verification import run_patched, verify_emitted
from .choose import MARGIN, fp32_plan, lowers_unsafe, make_plan, plain_plan
from .problem import Problem
from .workbench import Outputs, Workbench, reference

ROUNDS = 4
"""Times a plan that misses the budget is tightened before the audit says that the budget is out of reach."""

Tick = Callable[[str], None]


def plans_of(
    bench: Workbench,
    strategies: Sequence[str],
    formats: Sequence[str],
    baselines: Mapping[str, Baseline],
    tick: Tick,
) -> dict[str, Plan]:
    """Every plan, verified on inputs it was not made from where there are any.

    A plan that misses the budget, or is further off than the same model without a plan, is solved again for less error.
    """
    trial = bench.trial(bench.usable(bench.subject.batches))
    problems = {f"{strategy}_{fmt}": bench.problem(strategy, fmt) for strategy in strategies for fmt in formats}
    pending, found = dict.fromkeys(problems, MARGIN * bench.max_error), dict[str, Plan]()
    for _ in range(ROUNDS):
        for name, budget in pending.items():
            tick(name.replace("_", " "))
            found[name] = make_plan(problems[name], trial, budget, bench.findings)
        found |= verify(bench, {name: found[name] for name in pending}, tick)
        pending = {
            name: _tightened(budget, found[name], _allowed(found[name], baselines[name], bench.max_error))
            for name, budget in pending.items()
            if _has_low(found[name]) and (not found[name].verified or _outdone(found[name], baselines[name]))
        }
        if not pending:
            break
    harmful = {name: problem for name, problem in problems.items() if _outdone(found[name], baselines[name])}
    return found | _undone(bench, harmful, baselines, tick)


def as_run(baselines: Mapping[str, Baseline], plans: Mapping[str, Plan]) -> dict[str, Baseline]:
    """The baselines, those taken from the run of a plan where it lowers everything: the model without a plan is that model."""
    found = dict(baselines)
    for name, plan in plans.items():
        if not _has_fp32(plan) and plan.measured_error is not None:
            found[name] = replace(found[name], measured_error=plan.measured_error, finite=True, failure=None)
    return found


def _allowed(plan: Plan, baseline: Baseline, max_error: float) -> float:
    """The error that a plan may have: the budget, and no more than there is without the plan."""
    return min(max_error, baseline.measured_error or 0.0) if _outdone(plan, baseline) else max_error


def _outdone(plan: Plan, baseline: Baseline) -> bool:
    """Whether the model is closer to FP32 without the plan. With everything low the two are one."""
    if plan.measured_error is None or baseline.measured_error is None or not _has_fp32(plan):
        return False
    return plan.measured_error > baseline.measured_error


def _undone(
    bench: Workbench, problems: Mapping[str, Problem], baselines: Mapping[str, Baseline], tick: Tick
) -> dict[str, Plan]:
    """Plans that would do harm give way: to everything low, where that is safe and within the budget, else to FP32."""
    if not problems:
        return {}
    plans = {}
    for name, problem in problems.items():
        plans[name] = plain_plan(problem)
        within = (baselines[name].measured_error or 0.0) <= bench.max_error
        if not within or lowers_unsafe(problem, plans[name]):
            plans[name] = fp32_plan(problem)
    return verify(bench, plans, tick)


def verify(bench: Workbench, plans: Mapping[str, Plan], tick: Tick) -> dict[str, Plan]:
    """The plans with what their artefacts really do: errors against FP32, and whether they hold the budget."""
    batches = bench.checks
    expected = [reference(bench.subject, batch, bench.seed) for batch in batches]
    tick("running the patched model")
    if bench.subject.origin is not None:
        answers: Mapping[str, Outputs | str] = _in_fresh_process(bench, plans, batches)
    else:
        answers = {name: _in_this_process(bench, plan, batches) for name, plan in plans.items()}
    return {name: _judged(bench, plan, expected, answers[name]) for name, plan in plans.items()}


def _in_fresh_process(bench: Workbench, plans: Mapping[str, Plan], batches: Sequence[Batch]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "patched_model.py")
        file.write_text(
            emit(bench.subject.origin, parameters_of(bench.subject), plans, None, file.parent), encoding="utf-8"
        )
        moved = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(batches))
        return verify_emitted(file, list(plans), moved, bench.seed, bench.device)


def _in_this_process(bench: Workbench, plan: Plan, batches: Sequence[Batch]) -> Outputs | str:
    """Models that were handed over as objects have no source to build them from again: they are patched for a while."""
    try:
        with patched(bench.subject.model, plan_table(plan)) as model:
            return run_patched(model, batches, bench.device, bench.seed)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:300]}"


def _judged(bench: Workbench, plan: Plan, expected: Outputs, answer: Outputs | str) -> Plan:
    inputs = "held-out" if bench.subject.held_out else "audited"
    execution = "native" if bench.native else "emulated"
    if isinstance(answer, str):
        failed = Verification(None, False, None, inputs, execution, failure=answer)
        return replace(plan, measured_error=None, verified=False, verification=failed)
    pairs = [([x.cpu() for x in r], c) for r, c in zip(expected, answer, strict=True)]
    error = _worst([bench.distance(r, c) for r, c in pairs])
    worst = _worst([worst_output_error(r, c) for r, c in pairs])
    finite = math.isfinite(error)
    result = Verification(error if finite else None, finite, worst if math.isfinite(worst) else None, inputs, execution)
    return replace(plan, measured_error=result.error, verified=error <= bench.max_error, verification=result)


def _worst(values: Sequence[float]) -> float:
    """The largest; NaN if any is, so that it fails every threshold."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _tightened(budget: float, plan: Plan, max_error: float) -> float:
    """A new target for the solver, lower by as much as the artefact was over, and by half at least."""
    if plan.measured_error is None:
        return budget / 4
    return budget * min(0.5, MARGIN * max_error / plan.measured_error)


def _has_low(plan: Plan) -> bool:
    return any(choice.precision != "fp32" for choice in plan.scopes.values())


def _has_fp32(plan: Plan) -> bool:
    return any(choice.precision == "fp32" for choice in plan.scopes.values())


def parameters_of(subject: Subject) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in subject.model.parameters())


def recommend(plans: Mapping[str, Plan], max_error: float) -> tuple[str | None, str]:
    """The plan to use, and why, in one sentence. autocast before cast, since it also trains; then speed, then error."""
    good = [plan for plan in plans.values() if plan.verified and plan.low_precision_flops > 0]
    if not good:
        best = min(
            (p for p in plans.values() if p.measured_error is not None),
            key=lambda p: p.measured_error or 0,
            default=None,
        )
        reached = f"; the best that was reached is {best.measured_error:.2g} ({best.name})" if best else ""
        return None, f"Run it in FP32: no plan holds an error of {max_error:.2g} with anything low{reached}."
    chosen = min(
        good, key=lambda p: (p.strategy != "autocast", round(1 / p.predicted_speedup, 2), p.measured_error or 0.0)
    )
    islands = sum(choice.precision == "fp32" for choice in chosen.scopes.values())
    kept = "nothing has to stay FP32" if not islands else f"{islands} scope{'s' * (islands != 1)} stay FP32"
    return chosen.name, (
        f"{chosen.format.upper()} under {chosen.strategy}: measured error {chosen.measured_error:.2g} within the budget of "
        f"{max_error:.2g}, {chosen.low_precision_flops:.0%} of the FLOPs low, {kept}{_other(chosen, plans)}."
    )


def _other(chosen: Plan, plans: Mapping[str, Plan]) -> str:
    rivals = [p for p in plans.values() if p.strategy == chosen.strategy and p.format != chosen.format]
    if not rivals:
        return ""
    rival = rivals[0]
    if not rival.verified or rival.low_precision_flops == 0:
        return f"; {rival.format.upper()} does not hold the budget"
    return f"; {rival.format.upper()} measures {rival.measured_error:.2g} with {rival.low_precision_flops:.0%} of the FLOPs low"
