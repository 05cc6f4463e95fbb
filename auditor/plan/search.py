"""The one search for plans: predictions propose a choice, a replay accepts or refuses it, and says how far off predictions are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping

from ..errors import let_through
from ..records import Plan
from .mincut import Candidate

MARGIN = 0.8
"""Share of the budget a plan may use on the inputs it is made from: other inputs deserve some room."""

LITTLE = 0.01
"""Share of what a plan takes that no search goes on for."""

WORTH = 0.002
"""Share by which one more module low, or a plan of another strategy, must be better to be taken over."""

MOST_OFF = 4.0
"""How many times as large, or as small, errors are taken to be as predicted, at most."""

FAR = 1.2
"""How many times the limit a choice may be expected to take and is run all the same: predictions of some are further off."""

STRICTER = 0.95
"""Share of what was predicted of a choice that did not hold which the next one may be predicted to have."""

RUNS = 8
"""Replays in one search, at most."""

ROUNDS = 4
"""Times a plan whose artefact misses the budget is made for less error, before the budget is said to be out of reach."""


class Space(ABC):
    """All choices for one plan, and what replays of them came to. nothing: everything in FP32, which always holds.
    log: {key: error}, inf where it does not run. rejected: keys of those whose artefact did not hold."""

    nothing: Candidate

    def __init__(self) -> None:
        self.log: dict[Hashable, float] = {}
        self.rejected: set[Hashable] = set()

    def key(self, point: Candidate) -> Hashable:
        """What tells replays apart."""
        return point.high

    @abstractmethod
    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice that is predicted to have an error of at most `allowed`."""

    @abstractmethod
    def replay(self, point: Candidate) -> float:
        """Error of the recorded run under a choice. Raises: whatever an operation raises."""

    def error(self, point: Candidate) -> float:
        """Error of a replay, which is run once; inf where an operation raises, and of what was rejected."""
        key = self.key(point)
        if key not in self.log:
            try:
                self.log[key] = self.replay(point)
            except Exception as error:
                let_through(error)
                self.log[key] = math.inf
        return math.inf if key in self.rejected else self.log[key]

    def within_budget(self) -> list[Candidate]:
        """Choices that are known to hold the budget before any search, and were not rejected."""
        return []


def choose(space: Space, limit: float, runs: int = RUNS) -> Candidate:
    """The cheapest choice whose replay has an error of at most `limit`; without runs, the cheapest that is predicted to.

    What each replay says of predictions decides on the next proposal, so that few are needed. Where nothing is predicted to hold,
    one replay says whether that is so.
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
    """Of every space the plan whose artefact holds; where none does, the last that was tried.

    make(limits): choices whose errors are to stay within the limits. A choice that misses is rejected, and made again
    for less error: by as much as the artefact was over the budget, and by half at least.
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
