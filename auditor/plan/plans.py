"""All plans of an audit: made, run as the artefact a user gets, tightened where they miss the budget, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ..criteria.defaults import apart
from ..criteria.measure import Criteria
from ..criteria.noise import FLOOR
from ..errors import MeasureError, first_line
from ..formats.metrics import output_error, worst_output_error
from ..formats.table import FORMATS, label, runs
from ..raised import let_through
from ..records import Baseline, CriterionValue, Plan, Verification
from ..replay.chosen import scoped
from ..replay.strategies import running
from ..runs.outputs import on_cpu
from ..verify import Answers, said_no_memory
from .answered import answered
from .choose import (
    LITTLE,
    MARGIN,
    accepted,
    as_plan,
    fp32_plan,
    lowers_unsafe,
    make_plan,
    plain_plan,
    predicted_plan,
    ruled,
    simulated_error,
)
from .costs import heavy
from .explained import Explained, as_candidate, plainly_low, with_low
from .problem import Problem
from .recommend import gains, has_fp32
from .solve import evaluate
from .workbench import Workbench

WORTH = 0.002
"""Share by which a plan that could have been taken must be better, to be taken after all."""

IMPROVED = 3
"""Times that reasons are looked for, before what they show to be affordable is left."""

ROUNDS = 4
"""Times a plan that misses the budget is tightened before the audit says that the budget is out of reach."""

Tick = Callable[[str], None]
Known = Mapping[str, Plan]

NONE: Mapping[str, Plan] = {}

Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What a model returns in FP32, and patched."""


def plans_of(
    bench: Workbench,
    strategies: Sequence[str],
    formats: Sequence[str],
    baselines: Mapping[str, Baseline],
    tick: Tick,
    plain: Mapping[str, Plan] = NONE,
) -> dict[str, Plan]:
    """Every plan, verified on inputs it was not made from where there are any.

    A plan that misses the budget, or is further off than the same model without a plan, is solved again for less error.
    plain: plans with everything low that were run; for one that holds, no other is searched.
    """
    trial = bench.trial(bench.usable(bench.subject.batches))
    problems = {f"{strategy}_{fmt}": bench.problem(strategy, fmt) for strategy in strategies for fmt in formats}
    found = {name: plan for name, plan in plain.items() if plan.verified}
    targets = dict.fromkeys(problems, MARGIN * bench.max_error)
    pending = {name: budget for name, budget in targets.items() if name not in found}
    for _ in range(ROUNDS):
        targets |= pending
        for name, budget in pending.items():
            tick(name.replace("_", " "))
            if bench.quick:
                found[name] = predicted_plan(problems[name], budget)
            else:
                beside = trial.near(()) if heavy(bench.costs) else trial
                found[name] = make_plan(problems[name], beside, budget, baselines[name].measured_error)
        found |= _tried(bench, problems, {name: found[name] for name in pending}, targets, baselines, tick)
        pending = {
            name: _tightened(budget, found[name], _allowed(found[name], baselines[name], bench.max_error))
            for name, budget in pending.items()
            if _can_be_tightened(found[name]) and (not found[name].verified or _outdone(found[name], baselines[name]))
        }
        if not pending:
            break
    harmful = {name: problem for name, problem in problems.items() if _outdone(found[name], baselines[name])}
    found |= _undone(bench, harmful, baselines, tick)
    improvable = {n: p for n, p in problems.items() if runs(found[n].format) and has_fp32(found[n]) and not bench.quick}
    found |= _instead(bench, improvable, found, baselines, tick)
    return {
        name: _with_reasons(bench, problem, found[name], targets[name], baselines[name], tick)
        for name, problem in problems.items()
    }


def _tried(
    bench: Workbench,
    problems: Mapping[str, Problem],
    made: Mapping[str, Plan],
    targets: Mapping[str, float],
    baselines: Mapping[str, Baseline],
    tick: Tick,
) -> dict[str, Plan]:
    """The plans, verified; where runs are dear, with that low at once which their reasons show to be affordable, if it holds: but
    for plans that one of another strategy might be made from as they are, see `_as_another`."""
    more, formats = dict(made), [plan.format for plan in made.values() if runs(plan.format) and has_fp32(plan)]
    for name, plan in made.items() if heavy(bench.costs) and not bench.quick else ():
        if targets[name] == MARGIN * bench.max_error and formats.count(plan.format) == 1 and has_fp32(plan):
            found = _explained(bench, problems[name], plan, targets[name], baselines[name])
            more[name] = _with_affordable(bench, problems[name], plan, found) or plan
            found.pause()
    tried = verify(bench, more, tick)
    missed = {n: p for n, p in made.items() if not gains(tried[n]) or _outdone(tried[n], baselines[n])}
    missed = {n: p for n, p in missed.items() if more[n] is not p}
    return tried | (verify(bench, missed, tick) if missed else {})


def _explained(bench: Workbench, problem: Problem, plan: Plan, target: float, baseline: Baseline) -> Explained:
    trial = bench.trial(bench.usable(bench.checks) or bench.usable(bench.subject.batches))
    return Explained(problem, plan, trial, bench.max_error, target, bench.findings, plainly_low(plan, baseline))


def _with_affordable(bench: Workbench, problem: Problem, plan: Plan, found: Explained) -> Plan | None:
    """The plan with that low which its reasons show to be affordable; None where there is nothing that is worth it."""
    if not (modules := found.affordable(MARGIN * bench.max_error)):
        return None
    better = with_low(problem, plan, modules)
    little = LITTLE if heavy(bench.costs) else 0.0
    cheaper = as_candidate(problem, better).cost < (1 - little) * as_candidate(problem, plan).cost
    return better if cheaper else None


def _with_reasons(
    bench: Workbench, problem: Problem, plan: Plan, target: float, baseline: Baseline, tick: Tick
) -> Plan:
    """The plan with its reasons; where these show what can be lowered and gains by it, with that low.

    A plan may have been made for less error than there is room for, since what was predicted failed: runs need not go by that.
    """
    for left in reversed(range(IMPROVED)):
        tick(f"why {plan.name.replace('_', ' ')}")
        found = _explained(bench, problem, plan, target, baseline)
        if not left or bench.quick or not runs(plan.format):
            break
        if (better := _with_affordable(bench, problem, plan, found)) is None:
            break
        found.pause()
        tried = verify(bench, {plan.name: better}, tick)[plan.name]
        if not gains(tried) or _outdone(tried, baseline) or not _better(problem, tried, plan):
            break
        plan = tried
    return found.whole


def as_run(baselines: Mapping[str, Baseline], plans: Mapping[str, Plan]) -> dict[str, Baseline]:
    """The baselines, those taken from the run of a plan where it lowers everything: the model without a plan is that model."""
    found = dict(baselines)
    for name, plan in plans.items():
        if not has_fp32(plan) and plan.measured_error is not None:
            criteria = plan.verification.criteria if plan.verification else ()
            found[name] = replace(
                found[name], measured_error=plan.measured_error, finite=True, failure=None, criteria=criteria
            )
    return found


def _allowed(plan: Plan, baseline: Baseline, max_error: float) -> float:
    """The error that a plan may have: the budget, and no more than there is without the plan."""
    return min(max_error, baseline.measured_error or 0.0) if _outdone(plan, baseline) else max_error


def _outdone(plan: Plan, baseline: Baseline) -> bool:
    """Whether the model is closer to FP32 without the plan, by more than FP32's noise. With everything low the two are one."""
    if plan.measured_error is None or baseline.measured_error is None or not has_fp32(plan):
        return False
    noise = FLOOR * (plan.verification.noise or 0.0) if plan.verification else 0.0
    return plan.measured_error > baseline.measured_error + noise


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


def _instead(
    bench: Workbench,
    problems: Mapping[str, Problem],
    made: Mapping[str, Plan],
    baselines: Mapping[str, Baseline],
    tick: Tick,
) -> dict[str, Plan]:
    """What holds and is better by the objective than the plan that was made, of what could have been taken as well: all
    low, all that runs so, what the rules keep, what a plan of another strategy keeps.

    The curve may have nothing between a point that fails and FP32, and keeps to a share of the budget.
    """
    found: dict[str, Plan] = {}
    for attempt in (_plainly, _where_it_runs, _by_the_rules, _as_another):
        plans = {}
        for name, problem in problems.items():
            known = {**made, **found}
            tried = attempt(bench, problem, baselines[name], known)
            if tried is not None and not lowers_unsafe(problem, tried) and _better(problem, tried, known[name]):
                plans[name] = tried
        held = verify(bench, plans, tick) if plans else {}
        found |= {name: plan for name, plan in held.items() if gains(plan)}
    return found


def _better(problem: Problem, plan: Plan, than: Plan) -> bool:
    """Whether the one takes less by the objective, or the other is of no use."""
    return not gains(than) or as_candidate(problem, plan).cost < (1 - WORTH) * as_candidate(problem, than).cost


def _plainly(bench: Workbench, problem: Problem, baseline: Baseline, known: Known) -> Plan | None:
    return plain_plan(problem) if _holds(bench, baseline.measured_error) else None


def _where_it_runs(bench: Workbench, problem: Problem, baseline: Baseline, known: Known) -> Plan | None:
    if baseline.failure is None or gains(known[problem.name]):
        return None
    found = accepted(problem, bench.trial(bench.usable(bench.subject.batches)))
    return None if found is None else as_plan(problem, found)


def _by_the_rules(bench: Workbench, problem: Problem, baseline: Baseline, known: Known) -> Plan | None:
    alone = baseline.rules_only
    if alone is None or not _holds(bench, alone.measured_error):
        return None
    return as_plan(problem, ruled(problem, bench.findings))


def _as_another(bench: Workbench, problem: Problem, baseline: Baseline, known: Known) -> Plan | None:
    """The scopes of the best plan of another strategy in this format, where they hold under this one too."""
    rivals = [plan for plan in known.values() if plan.format == problem.format and plan.strategy != problem.strategy]
    energy, found = problem.energy, []
    for rival in filter(gains, rivals):
        kept = {owner for owner in energy.scopes if scoped(rival.scopes)(owner) == "fp32"}
        kept |= {other for owner in kept for other in energy.tied_to(owner)}
        labels = {owner: "fp32" if owner in kept else problem.format for owner in energy.scopes}
        found.append(evaluate(problem, energy.settled(labels)))
    best = min(found, key=lambda point: point.cost, default=None)
    if best is None or not best.cost < (1 - WORTH) * as_candidate(problem, known[problem.name]).cost:
        return None
    if baseline.measured_error is not None and set(best.precision.values()) == {problem.format}:
        return None  # everything low, which was run, and tried if it holds
    error = simulated_error(problem, best, bench.trial(bench.usable(bench.subject.batches)), bench.max_error)
    return as_plan(problem, best) if error <= MARGIN * bench.max_error else None


def _holds(bench: Workbench, error: float | None) -> bool:
    return error is not None and error <= bench.max_error


def verify(bench: Workbench, plans: Mapping[str, Plan], tick: Tick) -> dict[str, Plan]:
    """The plans with what their artefacts really do: errors against FP32, and whether they hold the budget.

    Of a plan in a format that torch does not compute in there is no artefact: it stays unverified, and says so.
    """
    run = {name: plan for name, plan in plans.items() if runs(plan.format)}
    found = {name: _unrunnable(bench, plan) for name, plan in plans.items() if name not in run}
    if run:
        expected = Answers(bench.references(bench.checks), bench.graded)
        tick("running the patched model")
        answers = answered(bench, run, lambda: tick("running the patched model"))
        found |= {name: judged(bench, plan, expected, answers[name]) for name, plan in run.items()}
    return {name: found[name] for name in plans}


def _unrunnable(bench: Workbench, plan: Plan) -> Plan:
    """The plan with the error of a replay of the captured graph under it, in words: nothing was measured on a model."""
    trial = bench.trial(bench.usable(bench.checks) or bench.usable(bench.subject.batches))
    try:
        error = f"gives an error of {trial.error(running(bench.capture, plan.strategy, scoped(plan.scopes), plan.format)):.2g}"
    except Exception as refused:
        let_through(refused)
        error = f"ends with: {first_line(refused)}"
    return _failed(
        bench,
        plan,
        f"torch has no arithmetic in {label(plan.format)}, so the plan cannot be run; replaying the recorded "
        f"graph with every value rounded {error}",
    )


def judged(bench: Workbench, plan: Plan, expected: Answers, answer: Answers | str) -> Plan:
    """The plan with what its artefact answered, held against what FP32 answers; or with why it did not answer."""
    if isinstance(answer, str):
        if bench.native and said_no_memory(answer):
            raise torch.OutOfMemoryError(answer)  # which says nothing of the plan
        return _failed(bench, plan, answer)
    return _held_against(bench, plan, *_pairs(expected, answer))


def _held_against(bench: Workbench, plan: Plan, pairs: Sequence[Pair], graded: Pair | None) -> Plan:
    try:
        found = worst_of([bench.distance(r, c) for r, c in pairs])
        worst = worst_of([worst_output_error(r, c) for r, c in pairs])
        enabled = bench.distance(*graded) if graded else None
    except MeasureError as error:
        return _failed(bench, plan, str(error))
    if graded and (otherwise := _mode_matters(plan, pairs[0], graded, bench.floor.joint)):
        return _failed(bench, plan, otherwise)
    finite = math.isfinite(found) and (enabled is None or math.isfinite(enabled))
    named = _criteria(bench, pairs, graded)
    result = replace(
        _unrun(bench),
        error=found if finite else None,
        joint=None if bench.distance is output_error else _number(worst_of([output_error(r, c) for r, c in pairs])),
        criteria=named,
        apart=apart(pairs),
        finite=finite,
        worst_output=worst if finite and math.isfinite(worst) else None,
        with_gradients=enabled if finite else None,
        noise=bench.floor.error,
        floor=bench.floor.floor if bench.floor.floor > bench.budget else 0.0,
        ungraded=bench.ungraded,
    )
    verified = finite and max(found, enabled or 0.0) <= bench.max_error and all(one.holds for one in named)
    return replace(plan, measured_error=result.error, verified=verified, verification=result)


def _criteria(bench: Workbench, pairs: Sequence[Pair], graded: Pair | None) -> tuple[CriterionValue, ...]:
    """What the user's criteria came to, worst run without gradients; held where it also is with them."""
    if not isinstance(bench.distance, Criteria):
        return ()
    return bench.distance.values(pairs, [graded] if graded else [])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _failed(bench: Workbench, plan: Plan, failure: str) -> Plan:
    verification = replace(_unrun(bench), failure=failure, criteria=_criteria(bench, (), None))
    return replace(plan, measured_error=None, verified=False, verification=verification)


def _unrun(bench: Workbench) -> Verification:
    inputs = "held-out" if bench.subject.held_out else "audited"
    return Verification(None, False, None, inputs, "native" if bench.native else "emulated")


def _pairs(expected: Answers, answer: Answers) -> tuple[list[Pair], Pair | None]:
    """FP32 and patched outputs, on the CPU, of every run without gradients, and of the one with them where there is one."""
    pairs = [(on_cpu(r), c) for r, c in zip(expected.outputs, answer.outputs, strict=True)]
    if expected.graded is None or answer.graded is None:
        return pairs, None
    return pairs, (on_cpu(expected.graded), answer.graded)


def _mode_matters(plan: Plan, without: Pair, enabled: Pair, noise: float = 0.0) -> str | None:
    """What to say of a patched model that is further off with gradients enabled than rounding, and FP32's noise, explains.

    Two runs of one plan that round differently are each as far from FP32 as the other, give or take a unit of the format.
    """
    before, after = output_error(*without), output_error(*enabled)
    if not math.isfinite(before) or after <= 2 * before + FORMATS[plan.format].epsilon + FLOOR * noise:
        return None
    return f"with gradients enabled it answers otherwise: error {after:.2g}, where it is {before:.2g} without"


def worst_of(values: Sequence[float]) -> float:
    """The largest; NaN if any is, so that it fails every threshold. Nothing gives 0."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def _tightened(budget: float, plan: Plan, max_error: float) -> float:
    """A new target for the solver, lower by as much as the artefact was over, and by half at least."""
    if plan.measured_error is None:
        return budget / 4
    return budget * min(0.5, MARGIN * max_error / plan.measured_error)


def _can_be_tightened(plan: Plan) -> bool:
    return runs(plan.format) and any(choice.precision != "fp32" for choice in plan.scopes.values())
