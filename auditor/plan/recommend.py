"""Recommends a plan for inference or training, and says why in one or two sentences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..artefact.strategies import plan_title, strategy_of
from ..criteria.defaults import FLIPS
from ..criteria.measure import OTHERS
from ..errors import PlanError
from ..numerics.formats import label, runs
from ..records import CriterionValue, Plan, Verification
from ..settings import MODES
from ..verify.running import says_nothing
from .modules import GAINS

NOISE = 0.03
"""Relative uncertainty of predicted time and memory: plans with a smaller difference count as equal."""


def gains(plan: Plan) -> bool:
    """Whether a plan meets the budget and the limit of the user's score, if any, and improves on FP32."""
    return plan.holds and is_worth_it(plan)


def is_worth_it(plan: Plan) -> bool:
    """Whether a plan improves on FP32. With objective `time`, it does not if it is measured to be slower than FP32, or
    if it keeps something in FP32 and is predicted to be slower."""
    times = plan.measured_times
    slower = plan.has_fp32 and plan.predicted_speedup < 1 if times is None else (times.speedup_high or 1.0) < 1
    return strategy_of(plan.strategy).gains(plan) and not (plan.objective == "time" and slower)


def best_for(plans: Mapping[str, Plan], use: str, stepped: Collection[str] | None = None) -> Plan | None:
    """Choose the plan with the best objective for a use, among plans within all limits that improve on FP32.

    A program is chosen only if no plan for the live model qualifies, and a plan with a doubtful error (see
    Plan.is_doubtful) only if all are. stepped: names of the plans under which the
    audited training step holds; None if no step was audited. Among equal plans the higher-ranked strategy is chosen,
    then the smaller error.
    """
    good = [plan for plan in plans.values() if _is_for(plan, use) and gains(plan)]
    good = [plan for plan in good if plan.program is None] or good
    if use == "training" and stepped is not None:
        good = [plan for plan in good if plan.name in stepped]
    good = [plan for plan in good if not plan.is_doubtful] or good
    for figure in (_need, _time):
        most = min((figure(plan)[1] for plan in good), default=math.inf)
        good = [plan for plan in good if figure(plan)[0] <= most]

    def preference(plan: Plan) -> tuple[int, float, float]:
        return strategy_of(plan.strategy).rank, plan.measured_error or 0.0, -plan.speedup

    return min(good, key=preference, default=None)


def recommend(
    plans: Mapping[str, Plan],
    max_error: float,
    use: str = "inference",
    stepped: Collection[str] | None = None,
    baselines: Mapping[str, Verification] | None = None,
) -> tuple[str | None, str]:
    """The name of the plan to use, or None for FP32; and the reason in words. stepped: as in `best_for`.

    baselines: {name of a plan: the run of its format and strategy with nothing kept in FP32}.

    Raises: PlanError(slug="no-verdict") if no plan qualifies and one could not be run for reasons other than precision.
    """
    best = {each: best_for(plans, each, stepped) for each in MODES}
    if (chosen := best[use]) is not None:
        why = (
            f"{plan_title(chosen)}: measured error {chosen.measured_error or 0.0:.2g} "
            f"within {_limit_clause(chosen, max_error)}, {chosen.low_precision_flops:.0%} of the FLOPs in low precision, "
            f"{kept_apart(chosen) or 'nothing'} kept in FP32"
        )
    else:
        _require_runs(plans)
        why = _none(plans, max_error, use, baselines or {})
    if each := [f"for {name}: {_worth(plan)}" for name, plan in best.items() if plan]:
        why += f". F{'; '.join(each)[1:]}"
    return chosen.name if chosen else None, f"{why}."


def _largest_error(plan: Plan, max_error: float) -> float:
    """The limit, as a number, that `_limit_clause` names in words; -inf if criteria decide instead of errors."""
    ran = plan.verification
    if ran is None:
        return max_error
    return -math.inf if ran.criteria else ran.floor or max_error


def _limit_clause(plan: Plan, max_error: float) -> str:
    """A text that names the limit with which the plan's error is compared."""
    ran = plan.verification
    if ran is not None and ran.criteria:
        return "the limit of every criterion"
    floor = ran.floor if ran is not None else 0.0
    return f"the {floor:.2g} by which FP32 runs differ" if floor else f"the error budget of {max_error:g}"


def _none(plans: Mapping[str, Plan], max_error: float, use: str, baselines: Mapping[str, Verification]) -> str:
    """A text on why no plan is recommended, with the limits that block, or the smallest reachable error if it is too
    large.

    Only if no run was within all limits, the text says that the model should be kept in FP32.
    """
    if not any(runs(plan.format) for plan in plans.values()):
        labels = " or ".join(dict.fromkeys(label(plan.format) for plan in plans.values()))
        return f"No plan is recommended: torch has no arithmetic in {labels}, so no plan can be run or verified"
    first = next(iter(plans.values()))
    allowed = _limit_clause(first, max_error)
    fails = "keeps the score within --max-drop" if any(plan.score for plan in plans.values()) else "can generate tokens"
    return {
        "not asked for": f"No plan for {use} was requested: plans of strategy autocast can train",
        "loses": f"Keep the model in FP32: no plan within {allowed} {fails}",
        "saves nothing": _saves_nothing(plans, allowed, baselines),
        "lowers nothing": f"No plan is recommended: within {allowed}, no plan runs any operation in low precision",
        "out of reach": _out_of_reach(plans, max_error, allowed, baselines),
    }[outcome(plans, use)]


def _saves_nothing(plans: Mapping[str, Plan], allowed: str, baselines: Mapping[str, Verification]) -> str:
    """A text for plans that are within the limits and save nothing, with the limits that block everything low."""
    what = GAINS[next(iter(plans.values())).objective]
    if baselines and all(run.failure for run in baselines.values()):
        return (
            "No plan is recommended: the model raises an error in low precision; with the operations that raise in FP32, "
            f"low precision saves no {what}"
        )
    all_low = {plan_title(plans[name]): run for name, run in baselines.items() if name in plans}
    blocking = _blocking_limits({f"{title}{NOTHING_KEPT}": run for title, run in all_low.items()})
    return f"No plan is recommended: low precision that stays within {allowed} saves no {what}{blocking}"


def _out_of_reach(
    plans: Mapping[str, Plan], max_error: float, allowed: str, baselines: Mapping[str, Verification]
) -> str:
    """A text for plans of which none is within the limits with anything in low precision."""
    holding = [name for name, run in baselines.items() if run.holds and name in plans]
    if holding:
        plan, reached = plans[holding[0]], baselines[holding[0]].measured_error or 0.0
        if not reached:
            return (
                f"No plan is recommended: {plan_title(plan)} changes nothing, since every operation then runs in FP32, and "
                f"no other plan with low precision is within {allowed}"
            )
        return (
            f"No plan is recommended: {plan_title(plan)} with nothing kept in FP32 is within {allowed} on these inputs "
            f"({reached:.2g}), but it runs operations that are unsafe on their own, so other inputs may exceed the limit"
        )
    errors = list[tuple[float, str]]()
    for plan in plans.values():
        error = plan.measured_error if plan.has_low else plan.reach
        errors += [] if error is None else [(error, plan_title(plan))]
    if errors and min(errors)[0] <= _largest_error(next(iter(plans.values())), max_error):
        nearest, title = min(errors)
        return (
            f"No plan is recommended: a run in {title} with almost everything in FP32 is within {allowed} ({nearest:.2g}), "
            "but its few low-precision operations are unsafe on their own, so other inputs may exceed the limit"
        )
    runs_of_plans = dict[str, Verification]()
    for name, plan in plans.items():
        run = plan.verification if plan.has_low else baselines.get(name)
        if run is not None:
            runs_of_plans[plan_title(plan) + NOTHING_KEPT * (not plan.has_low)] = run
    least = _blocking_limits(runs_of_plans)
    if not least and errors:
        least = "; the smallest reachable error is {:.2g}, in {}".format(*min(errors))
    return f"Keep the model in FP32: no plan with low precision is within {allowed}{least}"


def _blocking_limits(verified: Mapping[str, Verification]) -> str:
    """The violated limits of the low-precision run that comes nearest to all limits, with options that allow them.

    verified: {title: its run}. The result is "" if no run with criteria violates a limit.
    """
    nearest = math.inf
    violated = list[CriterionValue]()
    title = ""
    for name, run in verified.items():
        blocking = [criterion for criterion in run.criteria if not criterion.holds]
        shares = [math.inf if criterion.share is None else criterion.share for criterion in blocking]
        largest = max(shares, default=math.inf)
        if largest < nearest:
            nearest = largest
            violated = blocking
            title = name
    return f". In {title}: {blocking_limits(violated)}" if violated else ""


def blocking_limits(violated: Sequence[CriterionValue]) -> str:
    """Violated limits in words, the most violated first, with the options that allow the measured values. Only the first
    LIMITS_NAMED are named."""
    by_share = sorted(violated, key=lambda one: -math.inf if one.share is None else -one.share)
    named = "; ".join(map(_blocking_limit, by_share[:LIMITS_NAMED]))
    left = len(by_share) - LIMITS_NAMED
    if left <= 0:
        return named
    return f"{named}; and {left} more limit{'s are' if left > 1 else ' is'} exceeded"


def _blocking_limit(one: CriterionValue) -> str:
    """A violated limit in words, with the option that allows the measured value if errors have an upper limit."""
    value = "not finite" if one.value is None else f"{one.value:.3g}"
    measured = flipped_words(one) or f"{one.kind} of {one.output} is {value}"
    allowed = f"{measured}, and the limit is `{one.output}: {one.kind} {one.sign} {one.limit:g}`"
    if one.output == OTHERS:
        allowed = f"{measured}, and the limit is {one.limit:g}"
    if one.value is None or one.sign == ">=" or not one.limit < one.value:
        return allowed
    needed = _round_up(one.value)
    if one.kind.startswith("flips"):
        needed = max(FLIPS, min(needed, 1.0))
    option = f"--criterion '{one.output}: {one.kind} <= {needed:g}'"
    if one.output == OTHERS:
        option = f"--max-error {needed:g}"
    return f"{allowed}; to allow this: {option}"


def flipped_words(one: CriterionValue) -> str:
    """How many entries of an output differ: `1 of 65,536 entries of mask changes`; "" if their number is unknown."""
    if not one.kind.startswith("flips") or one.value is None or not one.entries:
        return ""
    changed = round(one.value * one.entries)
    return f"{changed:,} of {one.entries:,} entries of `{one.output}` change{'s' * (changed == 1)}"


LIMITS_NAMED = 2
"""Maximum number of violated limits that a sentence names."""
NOTHING_KEPT = ", with nothing kept in FP32"
"""The end of the title of a run in which everything is in low precision."""


def _round_up(value: float) -> float:
    """The smallest number of one significant digit that is at least `value`, which is positive."""
    unit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / unit) * unit:.1g}")


def _worth(plan: Plan) -> str:
    """A text on a plan: its title, its name in plan.json, and its value of the objective."""
    value = f"{plan.speedup:.2f}x{' measured' if plan.measured_times else ''}"
    if plan.objective == "flops":
        value = f"{plan.low_precision_flops:.0%} of the FLOPs in low precision"
    elif plan.objective == "memory":
        measured = plan.timed and plan.timed.decides and plan.timed.memory_share is not None
        value = f"{plan.memory_share:.0%} of the memory{' measured' if measured else ''}"
    return f"{plan_title(plan)} (`{plan.name}`), {value}"


def _require_runs(plans: Mapping[str, Plan]) -> None:
    for plan in plans.values():
        failure = next((ran.failure for ran in (plan.verification, plan.score) if ran and ran.failure), None)
        if says_nothing(failure):
            raise PlanError(
                f"the plan {plan.name} could not be run ({failure}). No other plan improves on FP32, so the audit can "
                "recommend neither a plan nor FP32: fix the cause of the failure and audit again",
                slug="no-verdict",
            )


def kept_apart(plan: Plan) -> str:
    """Words for the FP32 part of a plan: `3 modules and 2 functions`, `the output of 1 matrix product`; "" for none.

    For an exported program, operations are counted instead of modules and functions.
    """
    outputs = sum(len(choice.fp32_output) for choice in plan.scopes.values())
    kept = {"module": len(plan.kept_modules), "function": len(plan.exceptions) - outputs}
    if plan.program is not None:
        outputs = sum(each.only_output for each in plan.program.kept)
        kept = {"operation": len(plan.program.kept) - outputs}
    parts = list[str]()
    for what, number in kept.items():
        s = "" if number == 1 else "s"
        if number:
            parts.append(f"{number:,} {what}{s}")
    if outputs:
        s = "" if outputs == 1 else "s"
        parts.append(f"the output{s} of {outputs:,} matrix product{s}")
    return " and ".join(parts)


def outcome(plans: Mapping[str, Plan], use: str = "inference") -> str:
    """`plan` if a plan can be recommended for the use; otherwise the reason why not.

    `not asked for`; `loses`: a verified plan that would improve on FP32 fails the user's score, or cannot decode; `saves
    nothing`: low precision is within the limits but saves nothing; `lowers nothing`: every plan within the limits has
    low-precision modules, but no operation runs in low precision; `out of reach`: otherwise.
    """
    holding = [plan for plan in plans.values() if plan.holds and _is_for(plan, use)]
    if best_for(plans, use) is not None:
        return "plan"
    if plans and not any(_is_for(plan, use) for plan in plans.values()):
        return "not asked for"
    if any(_is_for(plan, use) and plan.is_verified and not plan.holds and is_worth_it(plan) for plan in plans.values()):
        return "loses"
    if any(map(_runs_low, holding)):
        return "saves nothing"
    return "lowers nothing" if holding and all(plan.has_low for plan in holding) else "out of reach"


def _is_for(plan: Plan, use: str) -> bool:
    return use != "training" or strategy_of(plan.strategy).trains


def _runs_low(plan: Plan) -> bool:
    """Whether a plan runs any operation in low precision, or could within the budget but would save nothing. Modules
    whose operations compute in FP32 anyway do not count."""
    if plan.has_low:
        return plan.low_precision_flops > 0 or not math.isclose(plan.predicted_speedup, 1.0, rel_tol=1e-9)
    spared = set(plan.kept_modules).difference(plan.kept_modules if plan.least is None else plan.least)
    idle = (reason for reason in plan.reasons if reason.kind == "no-gain" and reason.adds != 0)
    return any(spared.intersection(reason.modules) for reason in idle)


def _need(plan: Plan) -> tuple[float, float]:
    """Best and worst case of a plan's objective, relative to FP32. FLOPs are counted, not predicted; differences of up
    to 0.01 are ignored."""
    if plan.objective == "flops":
        return 1 - plan.low_precision_flops, 1.01 - plan.low_precision_flops
    return (plan.memory_share, plan.memory_share * (1 + NOISE)) if plan.objective == "memory" else _time(plan)


def _time(plan: Plan) -> tuple[float, float]:
    """Best and worst case of a plan's time, relative to FP32, from the spread of repeats or NOISE."""
    times, elapsed = plan.measured_times, 1 / plan.speedup
    if times is None:
        return elapsed, elapsed * (1 + NOISE)
    return elapsed * times.low / times.median, elapsed * times.high / times.median
