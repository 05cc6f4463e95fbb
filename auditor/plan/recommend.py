"""Which of the plans to use, for inference or for training, and why, in a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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


def memory_share(plan: Plan) -> float | None:
    """What it needs of FP32's memory: as it was measured where that counts, else as it is predicted, where it is."""
    if plan.timed and _weighed(plan):
        return plan.timed.memory_share
    if plan.memory is None or plan.fp32_memory is None:
        return None
    return float(sum(astuple(plan.memory)) / sum(astuple(plan.fp32_memory)))


def _weighed(plan: Plan) -> bool:
    """Whether its memory was measured on a GPU."""
    return plan.timed is not None and plan.timed.decides and plan.timed.memory_share is not None


def speedup(plan: Plan) -> float:
    """Over FP32: as it was measured where that counts, else as it is predicted."""
    times = measured_times(plan)
    return times.speedup if times and times.speedup else plan.predicted_speedup


def has_fp32(plan: Plan) -> bool:
    """Whether any scope of a plan is FP32, or a function in one, or any operation of its program."""
    kept = plan.program is not None and bool(plan.program.kept)
    return kept or any(choice.precision == "fp32" or choice.keep for choice in plan.scopes.values())


def best_for(plans: Mapping[str, Plan], use: str, stepped: Collection[str] | None = None) -> Plan | None:
    """Of the plans that hold and gain something, the best by its objective for this use; None where there is none.

    A program stands back where a plan keeps the live model what it is. stepped: names of those under which the audited
    training step holds; None where none was audited.
    """
    good = [plan for plan in _held(plans, use) if gains(plan)]
    good = [plan for plan in good if plan.program is None] or good
    if use == "training":
        good = [plan for plan in good if stepped is None or plan.name in stepped]
    for figure in (_taken, _elapsed):
        least = min(good, key=figure, default=None)
        most = math.inf if least is None else _as_good_as(least, figure)
        good = [plan for plan in good if min(figure(plan), _at_best(plan, figure)) <= most]
    closest = min((plan.measured_error or 0.0 for plan in good), default=0.0)
    return min(good, key=partial(_preference, closest), default=None)


def recommend(
    plans: Mapping[str, Plan], max_error: float, use: str = "inference", stepped: Collection[str] | None = None
) -> tuple[str | None, str]:
    """The plan to use, and why.

    The one that is best by the objective, of those whose strategy is for the use. Of those as good as it, and as fast as
    each other (within `NOISE`), the one whose strategy ranks first, then the one with the smallest error. stepped: see
    `best_for`.
    """
    chosen = best_for(plans, use, stepped)
    if chosen is None:
        _require_runs(plans)
        return None, _none(plans, max_error, use) + _else(plans, use, stepped)
    return chosen.name, (
        f"{label(chosen.format)} {strategy_of(chosen.strategy).title}: {_within(chosen, max_error)}, "
        f"{_share(chosen)}, {staying(chosen)}{_idly(chosen)}{_other(chosen, plans)}. {_uses(plans, stepped)}"
    )


def _require_runs(plans: Mapping[str, Plan]) -> None:
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
    if plan.program is not None:
        return count(len(plan.program.kept), "operation") if plan.program.kept else ""
    modules, functions = len(plan.kept), len(plan.exceptions)
    parts = [count(modules, "module")] if modules else []
    return " and ".join([*parts, count(functions, "function")] if functions else parts)


def staying(plan: Plan) -> str:
    """The same as a clause."""
    kept = kept_apart(plan)
    several = plan.kept if plan.program is None else plan.program.kept
    one = len(several) + len(plan.exceptions) == 1
    return f"{kept} {'stays' if one else 'stay'} FP32" if kept else "nothing has to stay FP32"


def saves_nothing(plans: Mapping[str, Plan], use: str = "inference") -> bool:
    """Whether low precision is within the budget of some plan for this use, and there is nothing to gain by it."""
    held = _held(plans, use)
    return not any(map(gains, held)) and any(map(_tried_low, held))


def lowers_nothing(plans: Mapping[str, Plan], use: str = "inference") -> bool:
    """Whether no plan for this use runs or casts anything low, though its scopes may be."""
    held = _held(plans, use)
    return bool(held) and not any(map(gains, held)) and all(has_low(plan) and not _runs_low(plan) for plan in held)


def asked_for(plans: Mapping[str, Plan], use: str) -> bool:
    """Whether any plan's strategy is for this use, be it within the budget or not."""
    return not plans or use != "training" or any(strategy_of(plan.strategy).trains for plan in plans.values())


def _held(plans: Mapping[str, Plan], use: str) -> list[Plan]:
    """Plans for this use that hold the budget."""
    held = [plan for plan in plans.values() if plan.holds]
    return [plan for plan in held if use != "training" or strategy_of(plan.strategy).trains]


def has_low(plan: Plan) -> bool:
    """Whether any scope of it is low."""
    return any(choice.precision != "fp32" for choice in plan.scopes.values())


def _runs_low(plan: Plan) -> bool:
    """Whether anything of it is low when it runs: it is timed otherwise than FP32 then, if only for its casts."""
    return plan.low_precision_flops > 0 or not math.isclose(plan.predicted_speedup, 1.0, rel_tol=1e-9)


def _tried_low(plan: Plan) -> bool:
    """Whether a run with something low held the budget: that of the plan, or one that its reasons are from."""
    return (has_low(plan) and _runs_low(plan)) or _whole(plan) or _part(plan)


def _whole(plan: Plan) -> bool:
    """Whether all low holds the budget: the plan is that, or it was run for its reasons."""
    return (has_low(plan) and not has_fp32(plan) and _runs_low(plan)) or (bool(plan.kept) and plan.least == ())


def _part(plan: Plan) -> bool:
    """Whether some of what a plan keeps in FP32 was run low within the budget, and its errors showed."""
    spared = set(plan.kept) - set(plan.kept if plan.least is None else plan.least)
    idle = [reason for reason in plan.reasons if reason.kind == "no-gain" and reason.adds]
    return any(reason.ran or spared.intersection(reason.modules) for reason in idle)


def _none(plans: Mapping[str, Plan], max_error: float, use: str) -> str:
    """Why there is no plan to use."""
    budget = "every criterion" if any(map(_criteria, plans.values())) else f"an error of {max_error:.2g}"
    if not any(runs(plan.format) for plan in plans.values()):
        labels = " or ".join(dict.fromkeys(label(plan.format) for plan in plans.values()))
        return f"Run it in FP32: torch has no arithmetic in {labels}, so no plan can be run or verified."
    measured = [plan for plan in plans.values() if plan.measured_error is not None and has_low(plan)]
    best = min(measured, key=lambda plan: plan.measured_error or 0, default=None)
    if not asked_for(plans, use):
        return "No plan for training was asked for: those of strategy autocast are for it."
    if lost := _lost(plans, use):
        return f"Run it in FP32: what holds {budget} does not keep the score{_least_lost(lost)}."
    if saves_nothing(plans, use):
        what = GAINS[next(iter(plans.values())).objective]
        if not any(map(_whole, _held(plans, use))):
            return f"Run it in FP32: what holds {budget} in low precision saves no {what}."
        return f"Run it in FP32: low precision holds {budget}, but there is no {what} to gain by it."
    if lowers_nothing(plans, use):
        return f"Run it in FP32: nothing in it runs low {_under(plans, use)}."
    reached = f"; the best that was reached is {_reached(best)}, by {_called(best)}" if best else _nearest(plans)
    return f"Run it in FP32: no plan holds {budget} with anything low{reached}."


def _criteria(plan: Plan) -> tuple[CriterionValue, ...]:
    """What the user's criteria came to under a plan; nothing where none were set."""
    return plan.verification.criteria if plan.verification else ()


def _within(plan: Plan, max_error: float) -> str:
    """That a plan keeps to what was allowed, and how much of it that takes."""
    if not _criteria(plan):
        if (plan.measured_error or 0.0) > max_error and plan.verification:
            return (
                f"measured error {plan.measured_error:.2g}, no more than {FLOOR:g} times what runs in FP32 differ by "
                f"({plan.verification.noise:.2g})"
            )
        return f"measured error {plan.measured_error:.2g} within the budget of {max_error:.2g}"
    most = max(_criteria(plan), key=lambda one: one.share or 0.0)
    if not most.share:
        return "every criterion holds, with nothing lost"
    return f"every criterion holds, {most.output}: {most.kind} takes {most.share:.2g} of what it allows"


def _measures(plan: Plan) -> str:
    """A plan's error."""
    taken = f"{plan.measured_error:.2g}"
    return f"takes {taken} of what a criterion allows" if _criteria(plan) else f"measures {taken}"


def _reached(plan: Plan) -> str:
    """The same, as what could be reached."""
    return f"{plan.measured_error:.2g}" + (" of what a criterion allows" if _criteria(plan) else "")


def _nearest(plans: Mapping[str, Plan]) -> str:
    """The smallest error within reach of a plan that runs nothing low, where that is known."""
    found = [plan for plan in plans.values() if plan.reach is not None]
    best = min(found, key=lambda plan: plan.reach or 0.0, default=None)
    if best is None or best.reach is None:
        return ""
    return f"; the smallest error within reach is {best.reach:.2g}, by {_called(best)}"


def _under(plans: Mapping[str, Plan], use: str) -> str:
    """`under autocast or with cast weights`: the strategies of the plans that hold."""
    return " or ".join(dict.fromkeys(strategy_of(plan.strategy).title for plan in _held(plans, use)))


def _lost(plans: Mapping[str, Plan], use: str) -> list[Plan]:
    """Plans for this use that would gain something within the budget, were it not for their score."""
    whole = {name: replace(plan, score=None) for name, plan in plans.items()}
    return [plans[plan.name] for plan in _held(whole, use) if gains(plan) and not plans[plan.name].holds]


def loses(plans: Mapping[str, Plan], use: str) -> bool:
    """Whether there is no plan for this use because those that would do lose too much of the score, or have none."""
    return best_for(plans, use) is None and bool(_lost(plans, use))


def _least_lost(lost: Sequence[Plan]) -> str:
    """The nearest that one of these comes to it."""
    off = {plan.name: abs(plan.score.difference) for plan in lost if plan.score and plan.score.difference is not None}
    if not off:
        return f" ({lost[0].score.failure})" if lost[0].score else ""
    name = min(off, key=lambda name: off[name])
    return f": the nearest is off by {off[name]:.2g} ({name})"


def _else(plans: Mapping[str, Plan], use: str, stepped: Collection[str] | None) -> str:
    """What there is for the other use, where there is nothing for this one."""
    other = next(name for name in USES if name != use)
    found = best_for(plans, other, stepped)
    return "" if found is None else f" That is about {use}: for {other}, {_called(found)} holds it at {_worth(found)}."


def _uses(plans: Mapping[str, Plan], stepped: Collection[str] | None) -> str:
    """The best plan for each use, with what it is worth."""
    found = {use: best_for(plans, use, stepped) for use in USES}
    named = [
        f"for {use}: {f'{_called(plan)}, {_worth(plan)}' if plan else _without(plans, use)}"
        for use, plan in found.items()
    ]
    return f"F{'; '.join(named)[1:]}."


def _called(plan: Plan) -> str:
    """A plan in words, and its name in plan.json."""
    return f"{label(plan.format)} {strategy_of(plan.strategy).title} (`{plan.name}`)"


def _without(plans: Mapping[str, Plan], use: str) -> str:
    """That there is no plan for a use."""
    if not asked_for(plans, use):
        return "none was asked for"
    if lowers_nothing(plans, use):
        return f"nothing runs low {_under(plans, use)}"
    if not saves_nothing(plans, use):
        return "none holds"
    return f"none that holds saves {GAINS[next(iter(plans.values())).objective]}"


def _worth(plan: Plan) -> str:
    """A plan's figure by its objective."""
    if plan.objective == "memory" and (share := memory_share(plan)) is not None:
        return f"{share:.0%} of the memory{' measured' if _weighed(plan) else ''}"
    if plan.objective == "flops":
        return f"{plan.low_precision_flops:.0%} of the FLOPs low"
    return f"{speedup(plan):.2f}x{' measured' if measured_times(plan) else ''}"


def _idly(plan: Plan) -> str:
    """That a plan holds and yet takes no less than FP32 by its objective, where that is so."""
    share = memory_share(plan) if plan.objective == "memory" else None
    taken = _elapsed(plan) if share is None else share
    if plan.objective == "flops" or taken < 1:
        return ""
    seen = "measured" if (_weighed(plan) if share is not None else measured_times(plan)) else "predicted"
    return f", {seen} to save no {GAINS[plan.objective]}"


def _share(plan: Plan) -> str:
    """How much of the model is low, of one that multiplies nothing how much faster it moves its data."""
    if plan.low_precision_flops:
        return f"{plan.low_precision_flops:.0%} of the FLOPs low"
    return f"no products to run low but {plan.predicted_speedup:.2g}x as fast by moving fewer bytes"


def _taken(plan: Plan) -> float:
    """What a plan needs by its objective."""
    if plan.objective == "memory" and (share := memory_share(plan)) is not None:
        return share
    return 1 - plan.low_precision_flops if plan.objective == "flops" else _elapsed(plan)


def _elapsed(plan: Plan) -> float:
    return 1 / speedup(plan)


def _timely(plan: Plan, figure: Callable[[Plan], float]) -> Times | None:
    """Its measured times, where the figure goes by them."""
    return measured_times(plan) if figure is _elapsed or plan.objective == "time" else None


def _at_best(plan: Plan, figure: Callable[[Plan], float]) -> float:
    """What it may need as well, as far as its repeats were apart."""
    times = _timely(plan, figure)
    return figure(plan) if times is None else figure(plan) * times.low / times.median


def _as_good_as(least: Plan, figure: Callable[[Plan], float]) -> float:
    """The most that is as good as what the least needs: what its slower repeats took where it was measured, else a little
    more than is predicted; of FLOPs, which are counted and not predicted, a hundredth of all counts as none."""
    if figure is _taken and least.objective == "flops":
        return figure(least) + 0.01
    times = _timely(least, figure)
    return figure(least) * (1 + NOISE if times is None else times.high / times.median)


def _preference(closest: float, plan: Plan) -> tuple[int, float, float]:
    """closest: the smallest error of any; what is no further from it than FP32's noise is as small."""
    error, ran = plan.measured_error or 0.0, plan.verification
    noise = FLOOR * (ran.noise or 0.0) if ran else 0.0
    return strategy_of(plan.strategy).rank, closest if error - closest <= noise else error, _elapsed(plan)


def _other(chosen: Plan, plans: Mapping[str, Plan]) -> str:
    rivals = [
        p for p in plans.values() if p.strategy == chosen.strategy and p.format != chosen.format and runs(p.format)
    ]
    if not rivals:
        return ""
    rival = rivals[0]
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
    return f"; {label(rival.format)} {_measures(rival)} with {_share(rival)}"
