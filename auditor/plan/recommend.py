"""Which of the plans to use, for inference or for training, and why, in a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, replace
from functools import partial

from ..artefact.strategies import strategy_of
from ..criteria.criterion import FLOOR
from ..errors import PlanError
from ..numerics.formats import label, runs
from ..records import Plan, Times
from ..verify import says_nothing
from .clauses import GAINS, count

NOISE = 0.03
"""Share by which a prediction of time or memory is off anyway: plans no further apart are as good as each other."""

USES = ("inference", "training")
"""What a plan is for. A strategy says whether its plans also train."""

Plans = Mapping[str, Plan]


def gains(plan: Plan) -> bool:
    """Whether a plan holds the budget, keeps the user's own score where there is one, and is worth more than FP32: a
    mixture that is predicted to be slower than it is not, nor is a plan that was measured to be."""
    times = measured_times(plan)
    slower = has_fp32(plan) and plan.predicted_speedup < 1 if times is None else (times.speedup_high or 1.0) < 1
    return plan.holds and strategy_of(plan.strategy).gains(plan) and not (plan.objective == "time" and slower)


def measured_times(plan: Plan) -> Times | None:
    """The times that a plan is judged by instead of its prediction: those of a GPU, run as it is."""
    times = plan.timed.eager if plan.timed and plan.timed.decides else None
    return times if times and times.speedup else None


def measured_memory(plan: Plan) -> float | None:
    """The same of its share of FP32's memory."""
    return plan.timed.memory_share if plan.timed and plan.timed.decides else None


def speedup(plan: Plan) -> float:
    """Over FP32: as it was measured where that counts, else as it is predicted."""
    times = measured_times(plan)
    return times.speedup if times and times.speedup else plan.predicted_speedup


def has_fp32(plan: Plan) -> bool:
    """Whether any scope of a plan is FP32, or a function in one, or any operation of its program."""
    kept = plan.program is not None and bool(plan.program.kept)
    return kept or any(choice.precision == "fp32" or choice.keep for choice in plan.scopes.values())


def has_low(plan: Plan) -> bool:
    """Whether any scope of it is low."""
    return any(choice.precision != "fp32" for choice in plan.scopes.values())


def best_for(plans: Plans, use: str, stepped: Collection[str] | None = None) -> Plan | None:
    """Of the plans that hold and gain something, the best by its objective for this use; None where there is none.

    A program stands back where a plan keeps the live model what it is. stepped: names of those under which the audited
    training step holds; None where none was audited. Of those as good, and as fast as each other, the one whose strategy ranks
    first, then the one with the smallest error.
    """
    good = [plan for plan in _held(plans, use) if gains(plan)]
    good = [plan for plan in good if plan.program is None] or good
    if use == "training" and stepped is not None:
        good = [plan for plan in good if plan.name in stepped]
    for figure in (_taken, _elapsed):
        least = min(good, key=figure, default=None)
        most = math.inf if least is None else _as_good_as(least, figure)
        good = [plan for plan in good if min(figure(plan), _spread(plan, figure)[0]) <= most]
    closest = min((plan.measured_error or 0.0 for plan in good), default=0.0)
    return min(good, key=partial(_preference, closest), default=None)


def recommend(
    plans: Plans, max_error: float, use: str = "inference", stepped: Collection[str] | None = None
) -> tuple[str | None, str]:
    """The plan to use, and why. stepped: see `best_for`.

    Raises: PlanError(slug="no-verdict") where there is none, and one has no run for a reason that is no error of precision.
    """
    best = {each: best_for(plans, each, stepped) for each in USES}
    if (chosen := best[use]) is not None:
        said = (
            f"{label(chosen.format)} {strategy_of(chosen.strategy).title}: measured error {chosen.measured_error or 0.0:.2g} "
            f"within {_allowed(chosen, max_error)}, {chosen.low_precision_flops:.0%} of the FLOPs low, {staying(chosen)}"
        )
    else:
        _require_runs(plans)
        said = f"Run it in FP32: {_none(plans, max_error, use)}"
    if any(best.values()):
        each = (f"for {name}: {_worth(plan) if plan else _none(plans, max_error, name)}" for name, plan in best.items())
        said += f". F{'; '.join(each)[1:]}"
    return chosen.name if chosen else None, f"{said}."


def _allowed(plan: Plan, max_error: float) -> str:
    """What its error is held against."""
    ran = plan.verification
    if ran is not None and ran.criteria:
        return "every criterion"
    floor = ran.floor if ran is not None else 0.0
    return f"the {floor:.2g} that FP32 varies by" if floor else f"the budget of {max_error:.2g}"


def _none(plans: Plans, max_error: float, use: str) -> str:
    """Why there is no plan for a use, with the smallest error of anything low where none is small enough."""
    if not any(runs(plan.format) for plan in plans.values()):
        labels = " or ".join(dict.fromkeys(label(plan.format) for plan in plans.values()))
        return f"torch has no arithmetic in {labels}, so no plan can be run or verified"
    match outcome(plans, use):
        case "not asked for":
            return "no plan for it was asked for: those of strategy autocast train"
        case "loses":
            return "what holds the budget does not keep the score"
        case "saves nothing":
            return f"what holds the budget in low precision saves no {GAINS[next(iter(plans.values())).objective]}"
        case "lowers nothing":
            return "nothing in it runs low"
    errors = ((plan.measured_error if has_low(plan) else plan.reach, name) for name, plan in plans.items())
    error, name = min(((error, name) for error, name in errors if error is not None), default=(None, ""))
    least = "" if error is None else f"; the smallest error within reach is {error:.2g} (`{name}`)"
    return f"no plan holds {_allowed(next(iter(plans.values())), max_error)} with anything low{least}"


def _worth(plan: Plan) -> str:
    """A plan, its name in plan.json, and its figure by its objective."""
    called, measured = f"{label(plan.format)} {strategy_of(plan.strategy).title} (`{plan.name}`)", False
    if plan.objective == "flops":
        worth = f"{plan.low_precision_flops:.0%} of the FLOPs low"
    elif plan.objective == "memory":
        worth, measured = f"{_taken(plan):.0%} of the memory", measured_memory(plan) is not None
    else:
        worth, measured = f"{speedup(plan):.2f}x", measured_times(plan) is not None
    return f"{called}, {worth}{' measured' if measured else ''}"


def _require_runs(plans: Plans) -> None:
    for plan in plans.values():
        failure = plan.verification.failure if plan.verification else None
        failure = failure or (plan.score.failure if plan.score else None)
        if says_nothing(failure):
            raise PlanError(
                f"`{plan.name}` could not be run ({failure}), and no other plan is worth more than FP32: there is no "
                "verdict without that run; fix its cause and audit again",
                slug="no-verdict",
            )


def kept_apart(plan: Plan) -> str:
    """How many modules a plan keeps in FP32, and functions in others: `3 modules and 2 functions`; nothing for none.

    Of a program, how many operations.
    """
    kept = {"module": len(plan.kept), "function": len(plan.exceptions)}
    if plan.program is not None:
        kept = {"operation": len(plan.program.kept)}
    return " and ".join(count(many, what) for what, many in kept.items() if many)


def staying(plan: Plan) -> str:
    """The same as a clause."""
    kept = kept_apart(plan)
    one = kept.startswith("1 ") and " and " not in kept
    return f"{kept} {'stays' if one else 'stay'} FP32" if kept else "nothing has to stay FP32"


def outcome(plans: Plans, use: str = "inference") -> str:
    """What there is for a use: `plan`; or why there is none: `not asked for`; `loses`: what would do loses too much of the score,
    or has none; `saves nothing`: low precision holds, and there is nothing to gain by it; `lowers nothing`: nothing runs low under
    any plan that holds; `out of reach`."""
    held = _held(plans, use)
    if best_for(plans, use) is not None:
        return "plan"
    if plans and use == "training" and not any(strategy_of(plan.strategy).trains for plan in plans.values()):
        return "not asked for"
    if _lost(plans, use):
        return "loses"
    if any(map(_ran_low, held)):
        return "saves nothing"
    return "lowers nothing" if held and all(map(has_low, held)) else "out of reach"


def _held(plans: Plans, use: str) -> list[Plan]:
    """Plans for this use that hold the budget."""
    return [plan for plan in plans.values() if plan.holds and (use != "training" or strategy_of(plan.strategy).trains)]


def _ran_low(plan: Plan) -> bool:
    """Whether anything of it is low when it runs, which is timed otherwise than FP32 then, if only for its casts; or something
    that gains nothing was run low within the budget, and its errors showed."""
    if has_low(plan) and (plan.low_precision_flops > 0 or not math.isclose(plan.predicted_speedup, 1.0, rel_tol=1e-9)):
        return True
    spared = set(plan.kept).difference(plan.kept if plan.least is None else plan.least)
    idle = [reason for reason in plan.reasons if reason.kind == "no-gain" and reason.adds]
    whole = bool(plan.kept) and plan.least == ()
    return whole or any(reason.ran or spared.intersection(reason.modules) for reason in idle)


def _lost(plans: Plans, use: str) -> list[Plan]:
    """Plans for this use that would gain something within the budget, were it not for their score."""
    whole = {name: replace(plan, score=None) for name, plan in plans.items()}
    return [plans[plan.name] for plan in _held(whole, use) if gains(plan) and not plans[plan.name].holds]


def _taken(plan: Plan) -> float:
    """What a plan needs by its objective, of what FP32 does."""
    if plan.objective == "flops":
        return 1 - plan.low_precision_flops
    if plan.objective == "time":
        return _elapsed(plan)
    if (share := measured_memory(plan)) is not None:
        return share
    if plan.memory is None or plan.fp32_memory is None:
        return _elapsed(plan)
    return float(sum(astuple(plan.memory)) / sum(astuple(plan.fp32_memory)))


def _elapsed(plan: Plan) -> float:
    return 1 / speedup(plan)


def _spread(plan: Plan, figure: Callable[[Plan], float]) -> tuple[float, float]:
    """What it takes at best and at worst, as far as repeats were apart, or predictions are off."""
    times = measured_times(plan) if figure is _elapsed or plan.objective == "time" else None
    if times is None:
        return figure(plan), figure(plan) * (1 + NOISE)
    return figure(plan) * times.low / times.median, figure(plan) * times.high / times.median


def _as_good_as(least: Plan, figure: Callable[[Plan], float]) -> float:
    """The most that is as good as what the least needs; of FLOPs, which are counted and not predicted, a hundredth of all is
    none."""
    return figure(least) + 0.01 if figure is _taken and least.objective == "flops" else _spread(least, figure)[1]


def _preference(closest: float, plan: Plan) -> tuple[int, float, float]:
    """closest: the smallest error of any; what is no further from it than FP32's noise is as small."""
    error, ran = plan.measured_error or 0.0, plan.verification
    noise = FLOOR * (ran.noise or 0.0) if ran else 0.0
    return strategy_of(plan.strategy).rank, closest if error - closest <= noise else error, _elapsed(plan)
