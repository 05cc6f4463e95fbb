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
from ..records import CriterionValue, Plan, Times
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
    """The plan to use, and why. stepped: see `best_for`."""
    chosen = best_for(plans, use, stepped)
    if chosen is None:
        _require_runs(plans)
        other = next(name for name in USES if name != use)
        instead = best_for(plans, other, stepped)
        rest = (
            f" That is about {use}: for {other}, {_called(instead)} holds it at {_worth(instead)}." if instead else ""
        )
        return None, _none(plans, max_error, use) + rest
    uses = "; ".join(f"for {use}: {_best(plans, use, stepped)}" for use in USES)
    return chosen.name, (
        f"{label(chosen.format)} {strategy_of(chosen.strategy).title}: {_within(chosen, max_error)}, "
        f"{_share(chosen)}, {staying(chosen)}{_idly(chosen)}{_other(chosen, plans)}. F{uses[1:]}."
    )


def _require_runs(plans: Plans) -> None:
    """Raises: PlanError(slug="no-verdict") where a plan has no run for a reason that is no error of precision."""
    for plan in plans.values():
        failure = plan.verification.failure if plan.verification else None
        failure = failure or (plan.score.failure if plan.score else None)
        if says_nothing(failure):
            raise PlanError(
                f"{_called(plan)} could not be run ({failure}), and no other plan is worth more than FP32: there is no "
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
    if any(map(_ran_low, held)) or any(map(_all_low_held, held)) or any(map(_part_held, held)):
        return "saves nothing"
    return "lowers nothing" if held and all(map(has_low, held)) else "out of reach"


def _held(plans: Plans, use: str) -> list[Plan]:
    """Plans for this use that hold the budget."""
    return [plan for plan in plans.values() if plan.holds and (use != "training" or strategy_of(plan.strategy).trains)]


def _ran_low(plan: Plan) -> bool:
    """Whether anything of it is low when it runs: it is timed otherwise than FP32 then, if only for its casts."""
    differs = plan.low_precision_flops > 0 or not math.isclose(plan.predicted_speedup, 1.0, rel_tol=1e-9)
    return has_low(plan) and differs


def _all_low_held(plan: Plan) -> bool:
    """Whether all low holds the budget: the plan is that, or it was run for its reasons."""
    return (_ran_low(plan) and not has_fp32(plan)) or (bool(plan.kept) and plan.least == ())


def _part_held(plan: Plan) -> bool:
    """Whether some of what a plan keeps in FP32 was run low within the budget, and its errors showed."""
    spared = set(plan.kept) - set(plan.kept if plan.least is None else plan.least)
    idle = [reason for reason in plan.reasons if reason.kind == "no-gain" and reason.adds]
    return any(reason.ran or spared.intersection(reason.modules) for reason in idle)


def _lost(plans: Plans, use: str) -> list[Plan]:
    """Plans for this use that would gain something within the budget, were it not for their score."""
    whole = {name: replace(plan, score=None) for name, plan in plans.items()}
    return [plans[plan.name] for plan in _held(whole, use) if gains(plan) and not plans[plan.name].holds]


def _none(plans: Plans, max_error: float, use: str) -> str:
    """Why there is no plan to use."""
    budget = "every criterion" if any(map(_criteria, plans.values())) else f"an error of {max_error:.2g}"
    if not any(runs(plan.format) for plan in plans.values()):
        labels = " or ".join(dict.fromkeys(label(plan.format) for plan in plans.values()))
        return f"Run it in FP32: torch has no arithmetic in {labels}, so no plan can be run or verified."
    match outcome(plans, use):
        case "not asked for":
            return "No plan for training was asked for: those of strategy autocast are for it."
        case "loses":
            return f"Run it in FP32: what holds {budget} does not keep the score{_least_lost(_lost(plans, use))}."
        case "saves nothing":
            what = GAINS[next(iter(plans.values())).objective]
            if any(map(_all_low_held, _held(plans, use))):
                return f"Run it in FP32: low precision holds {budget}, but there is no {what} to gain by it."
            return f"Run it in FP32: what holds {budget} in low precision saves no {what}."
        case "lowers nothing":
            return f"Run it in FP32: nothing in it runs low {_under(plans, use)}."
    return f"Run it in FP32: no plan holds {budget} with anything low{_nearest(plans)}."


def _nearest(plans: Plans) -> str:
    """The smallest error of a plan that runs something low; without one, the smallest within reach of those that do not."""
    ran = [(plan.measured_error, plan) for plan in plans.values() if plan.measured_error is not None and has_low(plan)]
    reached = [(plan.reach, plan) for plan in plans.values() if plan.reach is not None]
    if not (found := ran or reached):
        return ""
    error, plan = min(found, key=lambda each: each[0])
    said = "the best that was reached" if ran else "the smallest error within reach"
    return f"; {said} is {error:.2g}{' of what a criterion allows' if _criteria(plan) else ''}, by {_called(plan)}"


def _least_lost(lost: list[Plan]) -> str:
    """The nearest that one of these comes to the score."""
    off = [(abs(p.score.difference), p.name) for p in lost if p.score and p.score.difference is not None]
    if not off:
        return f" ({lost[0].score.failure})" if lost[0].score else ""
    return f": the nearest is off by {min(off)[0]:.2g} ({min(off)[1]})"


def _criteria(plan: Plan) -> tuple[CriterionValue, ...]:
    """What the user's criteria came to under a plan; nothing where none were set."""
    return plan.verification.criteria if plan.verification else ()


def _within(plan: Plan, max_error: float) -> str:
    """That a plan keeps to what was allowed, and how much of it that takes."""
    error, most = plan.measured_error or 0.0, max(_criteria(plan), key=lambda one: one.share or 0.0, default=None)
    if most is not None:
        lost = f"{most.output}: {most.kind} takes {most.share:.2g} of what it allows" if most.share else ""
        return f"every criterion holds, {lost or 'with nothing lost'}"
    if error > max_error and plan.verification:
        noise = f"{FLOOR:g} times what runs in FP32 differ by ({plan.verification.noise:.2g})"
        return f"measured error {error:.2g}, no more than {noise}"
    return f"measured error {error:.2g} within the budget of {max_error:.2g}"


def _under(plans: Plans, use: str) -> str:
    """`under autocast or with cast weights`: the strategies of the plans that hold."""
    return " or ".join(dict.fromkeys(strategy_of(plan.strategy).title for plan in _held(plans, use)))


def _best(plans: Plans, use: str, stepped: Collection[str] | None) -> str:
    """The best plan for a use, with what it is worth, or why there is none."""
    if (best := best_for(plans, use, stepped)) is not None:
        return f"{_called(best)}, {_worth(best)}"
    words = {
        "not asked for": "none was asked for",
        "lowers nothing": f"nothing runs low {_under(plans, use)}",
        "saves nothing": f"none that holds saves {GAINS[next(iter(plans.values())).objective]}",
    }
    return words.get(outcome(plans, use), "none holds")


def _called(plan: Plan) -> str:
    """A plan in words, and its name in plan.json."""
    return f"{label(plan.format)} {strategy_of(plan.strategy).title} (`{plan.name}`)"


def _worth(plan: Plan) -> str:
    """A plan's figure by its objective."""
    if plan.objective == "flops":
        return f"{plan.low_precision_flops:.0%} of the FLOPs low"
    if plan.objective == "memory":
        return f"{_taken(plan):.0%} of the memory" + (" measured" if measured_memory(plan) is not None else "")
    return f"{speedup(plan):.2f}x" + (" measured" if measured_times(plan) else "")


def _idly(plan: Plan) -> str:
    """That a plan holds and yet takes no less than FP32 by its objective, where that is so."""
    if plan.objective == "flops" or _taken(plan) < 1:
        return ""
    how = "measured" if _worth(plan).endswith(" measured") else "predicted"
    return f", {how} to save no {GAINS[plan.objective]}"


def _share(plan: Plan) -> str:
    """How much of the model is low, of one that multiplies nothing how much faster it moves its data."""
    if plan.low_precision_flops:
        return f"{plan.low_precision_flops:.0%} of the FLOPs low"
    return f"no products to run low but {plan.predicted_speedup:.2g}x as fast by moving fewer bytes"


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


def _other(chosen: Plan, plans: Plans) -> str:
    """What becomes of the other format under the same strategy."""
    alike = (
        p for p in plans.values() if p.strategy == chosen.strategy and p.format != chosen.format and runs(p.format)
    )
    if (rival := next(alike, None)) is None:
        return ""
    failings: tuple[tuple[Callable[[Plan], bool], str], ...] = (
        (lambda plan: plan.verification is None or plan.verification.failure is None, "fails to run"),
        (lambda plan: plan.verified, "does not hold the budget"),
        (lambda plan: plan.holds, "does not keep the score"),
        (gains, "has nothing low that gains anything within the budget"),
    )
    for passes, failing in failings:
        if not passes(rival):
            elsewhere = any(passes(plan) for plan in plans.values() if plan.format == rival.format)
            strategy = f" {strategy_of(rival.strategy).title}" if elsewhere else ""
            return f"; {label(rival.format)}{strategy} {failing}"
    taken = f"{rival.measured_error:.2g}"
    taken = f"takes {taken} of what a criterion allows" if _criteria(rival) else f"measures {taken}"
    return f"; {label(rival.format)} {taken} with {_share(rival)}"
