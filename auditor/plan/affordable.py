"""What a plan could lower as well, found in one run: for models whose runs are dear."""

from __future__ import annotations

from ..paths import module_of
from .choose import LITTLE, MOST_OFF
from .reasons import EachLowered, Error, Limits, adds_to, holds, lowering, most_runs


def affordable_at_once(
    lowered: EachLowered, limits: Limits, error: Error, own: float, target: float
) -> tuple[str, ...]:
    """Modules that gain something low and are predicted to add to an error of `own` what keeps it within `target`, where a run
    with all of them low holds the budget; where it does not, those of which a run of each says so.

    None without a run where nothing is left of the target, or all of them gain little.
    """
    problem, chosen = lowered.problem, lowered.chosen
    gaining = [each for each in lowered.open if each.gains and each.owner == module_of(each.owner)]
    points = {each.owner: each.point for each in gaining[: most_runs(problem)] if each.point is not None}
    adds = {each.owner: adds_to(each, chosen, limits) for each in gaining}
    maybe = {
        owner: point for owner, point in points.items() if own + min(adds[owner], adds[owner] / MOST_OFF) <= target
    }
    likely = [owner for owner in maybe if own + adds[owner] <= target]
    if own > target or not lowering(problem, chosen, maybe).cost < (1 - LITTLE) * chosen.cost:
        return ()
    found = likely
    if not likely or not error(lowering(problem, chosen, likely)) <= limits.budget:
        found = [owner for owner, point in maybe.items() if holds(error(point), limits, own, target)]
        found = [] if found == likely else found
    return tuple(owner for owner in lowered.kept if owner in found)
