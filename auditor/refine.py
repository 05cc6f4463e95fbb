"""Between the corners that cuts reach: single scopes and pairs of scopes changed, as long as a plan gets better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from .energy import Energy, energy_of
from .problem import FORBIDDEN, Problem
from .solve import Candidate, evaluate

SCOPES = 16
"""Largest number of scopes whose pairs are all tried; with more of them, the points that cuts reach lie close enough."""


def refined(problem: Problem, start: Candidate, allowed_error: float) -> Candidate:
    """The cheapest choice that changing one scope or two at a time leads to, its predicted error within `allowed_error`.

    `start` itself where there are too many scopes, or where nothing better is near.
    """
    energy = energy_of(problem)
    if len(energy.scopes) > SCOPES:
        return start
    best, better, seen = start, True, set[tuple[tuple[str, str], ...]]()
    while better:
        better = False
        for precision in _neighbours(problem, energy, best):
            key = tuple(sorted(precision.items()))
            if key in seen:
                continue
            seen.add(key)
            point = evaluate(problem, precision)
            if point.price < best.price and point.predicted_error <= min(allowed_error, math.sqrt(FORBIDDEN) / 2):
                best, better = point, True
    return best


def _neighbours(problem: Problem, energy: Energy, point: Candidate) -> Iterator[dict[str, str]]:
    groups = sorted({tuple(sorted({owner, *energy.tied_to(owner)})) for owner in energy.scopes})
    other = {"fp32": problem.format, problem.format: "fp32"}
    for count in (1, 2):
        for changed in itertools.combinations(groups, count):
            flipped = {owner: other[point.precision[owner]] for group in changed for owner in group}
            yield energy.settled({**point.precision, **flipped})
