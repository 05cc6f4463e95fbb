"""The search for plans: predictions propose a choice; a replay accepts or rejects it, and corrects the predictions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping

from ..errors import let_through
from ..records import Plan
from .mincut import Candidate

MARGIN = 0.8
"""Share of the budget that a plan may use on the calibration inputs: other inputs may have larger errors."""

LITTLE = 0.01
"""Relative saving below which a search stops."""

WORTH = 0.002
"""Relative saving that one more low module, or a choice of another strategy, must have to be adopted."""

MOST_OFF = 4.0
"""Largest factor by which errors are assumed to differ from predictions."""

FAR = 1.2
"""A choice is run even if its expected error is up to this many times the limit, since predictions may be too large."""

STRICTER = 0.95
"""If a choice misses the limit, the next one's predicted error is at most this share of the missed one's."""

RUNS = 8
"""Maximum number of replays in one search."""

ROUNDS = 4
"""Maximum number of attempts, each with a smaller error, to make a plan whose artefact meets the budget."""


class Space(ABC):
    """All choices for one plan, and the results of their replays. nothing: everything in FP32, which always holds.
    log: {key: error}, inf if the replay raises. rejected: keys of choices whose artefact missed the budget."""

    nothing: Candidate

    def __init__(self) -> None:
        self.log: dict[Hashable, float] = {}
        self.rejected: set[Hashable] = set()

    def key(self, point: Candidate) -> Hashable:
        """Key of a choice in the log: choices with equal keys share one replay."""
        return point.high

    @abstractmethod
    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice with a predicted error of at most `allowed`."""

    @abstractmethod
    def replay(self, point: Candidate) -> float:
        """Error of a replay of the recorded graph under a choice. Raises: whatever an operation raises."""

    def error(self, point: Candidate) -> float:
        """Error of a choice's replay, cached; inf if an operation raises or the choice was rejected."""
        key = self.key(point)
        if key not in self.log:
            try:
                self.log[key] = self.replay(point)
            except Exception as error:
                let_through(error)
                self.log[key] = math.inf
        return math.inf if key in self.rejected else self.log[key]

    def within_budget(self) -> list[Candidate]:
        """Choices that are known to meet the budget before any search, and were not rejected."""
        return []


def choose(space: Space, limit: float, runs: int = RUNS) -> Candidate:
    """The cheapest choice found whose replay has an error of at most `limit`; if `runs` is 0, the cheapest by
    prediction.

    Each replay corrects the predictions for the next proposal, so that few are needed. If no choice is predicted to
    meet the limit, one replay checks that.
    """
    if not runs:
        return space.propose(limit)
    best = min((*space.within_budget(), space.nothing), key=lambda point: point.price)
    correction, ceiling = 1.0, math.inf
    for run in range(runs):
        most = best.price if best == space.nothing else (1 - LITTLE) * best.price
        hopes = (1.0, FAR, math.inf) if run == 0 and best == space.nothing else (1.0, FAR)
        points = (space.propose(min(hope * limit / correction, ceiling)) for hope in hopes)
        point = next((point for point in points if point.price < most), None)
        if point is None:
            break
        error = space.error(point)
        if math.isfinite(error) and point.predicted_error:
            correction = min(max(error / point.predicted_error, 1 / MOST_OFF), MOST_OFF)
        if error <= limit:
            best = point
        else:
            ceiling = point.predicted_error * (STRICTER if math.isfinite(error) else 0.5)
    return best


def find_verified(
    spaces: Mapping[str, Space],
    max_error: float,
    make: Callable[[Mapping[str, float]], Mapping[str, Candidate]],
    verify: Callable[[Mapping[str, Candidate]], Mapping[str, Plan]],
    holds: Callable[[str, Plan], bool],
) -> dict[str, Plan]:
    """Return for every space a plan whose artefact holds; if none does, the last plan tried.

    make: returns choices with errors within the limits. A choice that misses is rejected and made again with a smaller
    limit: divided by the artefact's excess over the budget, and at least halved.
    """
    limits, plans = dict.fromkeys(spaces, MARGIN * max_error), dict[str, Plan]()
    for _ in range(ROUNDS):
        if not limits:
            break
        made = make(limits)
        plans |= verify(made)
        missed = [name for name in made if made[name] != spaces[name].nothing and not holds(name, plans[name])]
        for name in missed:
            spaces[name].rejected.add(spaces[name].key(made[name]))
            error = plans[name].measured_error
            limits[name] *= 0.25 if error is None else min(0.5, MARGIN * max_error / error)
        limits = {name: limits[name] for name in missed}
    return plans
