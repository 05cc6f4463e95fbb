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

    Those that gain most may add more than that together, as long as the run holds; others are not taken with them then. None
    without a run where nothing is left of the target, or all of them gain little.
    """
    problem, chosen, room, most = lowered.problem, lowered.chosen, target - own, most_runs(lowered.problem)
    gaining = [each for each in lowered.open if each.gains and each.owner == module_of(each.owner)]
    likely = list[str]()
    for place, each in enumerate(gaining):
        if adds_to(each.predicted, chosen, limits) <= room:
            together = lowering(problem, chosen, [*likely, each.owner])
            if place < most or adds_to(together.predicted_error, chosen, limits) <= room:
                likely.append(each.owner)
    maybe = [each.owner for each in gaining[:most] if adds_to(each.predicted, chosen, limits) <= MOST_OFF * room]
    tried = [*dict.fromkeys([*likely, *maybe])]
    if not lowering(problem, chosen, tried).cost < (1 - LITTLE) * chosen.cost:
        return ()
    found = likely
    if len(likely) < 2 or not error(lowering(problem, chosen, likely)) <= limits.budget:
        found = [path for path in tried[:most] if holds(error(lowering(problem, chosen, [path])), limits, own, target)]
        found = [] if len(likely) > 1 and found == likely else found
    return tuple(owner for owner in lowered.kept if owner in found)
